"""Names of NumPy, Colossal-AI, Megatron-LM, DeepSpeed and PyTorch, and their counterparts here.

`KEYS` are keys of configurations, named in the error of an unknown key; `NAMES` are names of modules, named where a
program asks `parlinalg`, `parlinalg.nn`, … for them: `missing` makes the `__getattr__` of these modules.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

_LINEAR = 'nn.Linear(…, mesh.scheme, mesh.grid, kind="expand") into a block, kind="contract" out of it, on every grid'
_CLASSIFIER = "nn.Classifier(…, mesh.scheme, mesh.grid), on every grid"
_EMBEDDING = "nn.Embedding(…, mesh.scheme, mesh.grid), whose vocabulary every scheme cuts"
_NORM = "nn.LayerNorm(…, mesh.scheme, mesh.grid), on every grid"
_PATCHES = "nn.PatchEmbedding(…, mesh.scheme, mesh.grid), on every grid"
_LOSS = "pla.ops.cross_entropy, on logits of any layout"
_LOSS_SUM = "pla.ops.cross_entropy_sum, on logits of any layout"
_MESH = (
    'the mesh that pla.launch(config) returns: mesh.rank("data"), mesh.size("tensor"), mesh.comm("pipeline"); nothing '
    "is global"
)
_LAUNCH = "pla.launch(config), under mpiexec or srun"
_WRAP = "pla.initialize(model, optimizer, criterion, …), which sums gradients as the configuration says"
_ZERO = "the configuration's zero=1, 2 or 3, and pla.initialize"
_LAYOUT = 'pla.Layout("data", None): for every dim the axes that cut it'
_PRECISION = 'the configuration\'s precision="fp16" or "bf16"'
_CHECKPOINTS = "pla.CheckpointHook(folder, every=…) of a pla.Trainer, or pla.Checkpoints"
_MICRO = 'schedule=dict(name="1f1b", microbatches=…) in a pipeline, gradient_accumulation=… without one'
_TENSOR = 'parallel=dict(tensor=dict(size=…, mode="1d"))'
_PIPELINE = "parallel=dict(pipeline=…)"
_STAGE = "zero=dict(stage=…)"
_OFFLOAD = 'offload=dict(optimizer="host")'
_BATCH = "batch_size, of all ranks together"
_RECOMPUTE = 'model=dict(recompute="block")'

KEYS: dict[str, str] = {
    # Colossal-AI
    "BATCH_SIZE": _BATCH,
    "NUM_EPOCHS": "epochs",
    "NUM_MICRO_BATCHES": _MICRO,
    "TENSOR_SHAPE": "nothing: stages tell each other what they send",
    "SEQ_LENGTH": "data=dict(sequence_length=…)",
    "SEQ_LEN": "data=dict(sequence_length=…)",
    "HIDDEN_SIZE": "model=dict(hidden_size=…)",
    "NUM_HEADS": "model=dict(num_attention_heads=…)",
    "DEPTH": "model=dict(num_hidden_layers=…), or parallel.tensor.depth of mode 2.5d",
    "LEARNING_RATE": "optimizer=dict(lr=…)",
    "LR": "optimizer=dict(lr=…)",
    "WEIGHT_DECAY": "optimizer=dict(weight_decay=…)",
    "WARMUP_EPOCHS": "lr_schedule=dict(warmup=…), in steps",
    "WARMUP_STEPS": "lr_schedule=dict(warmup=…)",
    "LOG_PATH": "--out DIR",
    "SEED": "seed",
    "DATA_PATH": "data=dict(path=…)",
    "fp16": 'precision="fp16"; with options precision=dict(dtype="fp16", loss_scale=dict(start=…))',
    "bf16": 'precision="bf16"',
    "amp": 'precision="fp16" or "bf16"',
    "model_config": "zero=dict(stage=3); chunks and shard strategies are not chosen by hand",
    "optimizer_config": 'zero=dict(stage=1) for shared states, offload=dict(optimizer="host") for states on the host',
    "clip_grad": "clip_grad_norm",
    "num_microbatches": _MICRO,
    "sequence_parallel_size": "parallel=dict(sequence=…)",
    "cudnn_benchmark": "nothing",
    "cudnn_deterministic": "nothing: sums are in one order",
    # Megatron-LM
    "tensor_model_parallel_size": _TENSOR,
    "pipeline_model_parallel_size": _PIPELINE,
    "virtual_pipeline_model_parallel_size": 'schedule=dict(name="interleaved", chunks=…)',
    "num_layers_per_virtual_pipeline_stage": 'schedule=dict(name="interleaved", chunks=…)',
    "context_parallel_size": "parallel=dict(sequence=…)",
    "sequence_parallel": 'parallel=dict(tensor=dict(mode="1d", sequence_parallel=True))',
    "expert_model_parallel_size": "parallel=dict(experts=…), of the data parallel ranks",
    "num_experts": "model=dict(num_local_experts=…)",
    "n_routed_experts": "model=dict(num_local_experts=…)",
    "n_shared_experts": "model=dict(shared_expert_intermediate_size=…), the common width of all shared experts",
    "moe_intermediate_size": "model=dict(intermediate_size=…), of each expert",
    "moe_ffn_hidden_size": "model=dict(intermediate_size=…), of each expert",
    "moe_router_topk": "model=dict(num_experts_per_tok=…)",
    "moe_aux_loss_coeff": "model=dict(router_aux_loss_coef=…)",
    "moe_shared_expert_intermediate_size": "model=dict(shared_expert_intermediate_size=…)",
    "ep_size": "parallel=dict(experts=…), of the data parallel ranks",
    "expert_parallel_size": "parallel=dict(experts=…), of the data parallel ranks",
    "micro_batch_size": f"{_MICRO}; batch_size is that of a whole step",
    "global_batch_size": _BATCH,
    "num_layers": "model=dict(num_hidden_layers=…)",
    "ffn_hidden_size": "model=dict(intermediate_size=…)",
    "seq_length": "data=dict(sequence_length=…)",
    "max_sequence_length": "data=dict(sequence_length=…)",
    "train_iters": "steps",
    "lr_decay_style": 'lr_schedule="cosine"',
    "lr_warmup_iters": "lr_schedule=dict(warmup=…)",
    "recompute_granularity": _RECOMPUTE,
    "use_distributed_optimizer": "zero=1",
    "save_interval": "checkpoint=dict(every=…)",
    # DeepSpeed
    "zero_optimization": _STAGE,
    "train_batch_size": _BATCH,
    "train_micro_batch_size_per_gpu": f"{_MICRO}; batch_size is that of a whole step",
    "gradient_accumulation_steps": "gradient_accumulation",
    "gradient_clipping": "clip_grad_norm",
    "offload_optimizer": _OFFLOAD,
    "offload_param": 'offload=dict(parameters="host"), with zero=3',
    "activation_checkpointing": _RECOMPUTE,
    "scheduler": "lr_schedule",
    "steps_per_print": "nothing: metrics.jsonl has every step",
    # PyTorch and Hugging Face
    "dp": "parallel=dict(data=…)",
    "tp": _TENSOR,
    "pp": _PIPELINE,
    "data_parallel_size": "parallel=dict(data=…)",
    "tensor_parallel_size": _TENSOR,
    "pipeline_parallel_size": _PIPELINE,
    "world_size": "nothing: mpiexec -n says it",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "num_epochs": "epochs",
    "learning_rate": "optimizer=dict(lr=…)",
    "lr": "optimizer=dict(lr=…)",
    "weight_decay": "optimizer=dict(weight_decay=…)",
    "max_grad_norm": "clip_grad_norm",
    "per_device_train_batch_size": _BATCH,
    "gradient_checkpointing": _RECOMPUTE,
    "loss": 'criterion="cross_entropy"',
}

NAMES: dict[str, str] = {
    # NumPy, where the Array API standard has another name
    "absolute": "pla.abs",
    **{f"arc{f}": f"pla.a{f}" for f in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    "arctan2": "pla.atan2",
    "power": "pla.pow",
    "mod": "pla.remainder",
    "true_divide": "pla.divide",
    "conjugate": "pla.conj",
    "invert": "pla.bitwise_invert",
    "concatenate": "pla.concat",
    "transpose": "pla.permute_dims(x, axes), or x.T",
    "cumsum": "pla.cumulative_sum",
    "cumprod": "pla.cumulative_prod",
    "unique": "pla.unique_values",
    "dot": "A @ B, or pla.vecdot",
    "inner": "pla.vecdot, or pla.tensordot",
    "outer": "pla.linalg.outer",
    "identity": "pla.eye",
    **{name: f"np.{name}, which takes distributed arrays" for name in (
        "allclose", "array_equal", "isclose", "vstack", "hstack", "flatnonzero", "fliplr", "flipud", "append", "ravel",
        "swapaxes")},
    # Colossal-AI
    **dict.fromkeys(("global_context", "gpc", "core", "ParallelMode", "ParallelContext", "Config"), _MESH),
    **dict.fromkeys(("launch_from_torch", "launch_from_openmpi", "launch_from_slurm", "init_dist"), _LAUNCH),
    "get_default_parser": "nothing: ranks come from mpiexec or srun, and pla.launch(config) takes a file's path",
    **dict.fromkeys(
        ("Linear1D", "Linear1D_Col", "Linear1D_Row", "Linear2D", "Linear2p5D", "Linear3D", "ColumnParallelLinear",
         "RowParallelLinear", "LinearLayer"), _LINEAR,
    ),
    **dict.fromkeys(("Classifier1D", "Classifier2D", "Classifier2p5D", "Classifier3D", "VocabParallelClassifier1D",
                     "VocabParallelClassifier2D", "VocabParallelClassifier2p5D", "VocabParallelClassifier3D"),
                    _CLASSIFIER),
    **dict.fromkeys(("Embedding1D", "Embedding2D", "Embedding2p5D", "Embedding3D", "VocabParallelEmbedding",
                     "VocabParallelEmbedding1D", "VocabParallelEmbedding2D", "VocabParallelEmbedding2p5D",
                     "VocabParallelEmbedding3D"), _EMBEDDING),
    **dict.fromkeys(("LayerNorm1D", "LayerNorm2D", "LayerNorm2p5D", "LayerNorm3D", "FusedLayerNorm"), _NORM),
    **dict.fromkeys(("PatchEmbedding1D", "PatchEmbedding2D", "PatchEmbedding2p5D", "PatchEmbedding3D"), _PATCHES),
    **dict.fromkeys(("CrossEntropyLoss1D", "CrossEntropyLoss2D", "CrossEntropyLoss2p5D", "CrossEntropyLoss3D",
                     "CrossEntropyLoss", "VocabParallelCrossEntropyLoss1D", "VocabParallelCrossEntropyLoss2D"),
                    _LOSS_SUM),
    **dict.fromkeys(("vocab_parallel_cross_entropy", "cross_entropy_loss"), _LOSS),
    **dict.fromkeys(("Dropout1D", "Dropout2D", "Dropout3D"), "nn.Dropout, which drops the same on every grid"),
    "PipelinableContext": "pla.initialize, or pla.pipeline.build_pipeline_model(model) of a declared model",
    "PipelineSharedModuleWrapper": "nothing: parameters that stages share are known and summed",
    **dict.fromkeys(("AMP_TYPE", "GradScaler", "autocast", "convert_to_amp"), _PRECISION),
    **dict.fromkeys(("ShardedModelV2", "ShardedOptimizerV2", "ZeroInitContext", "GeminiDDP", "GeminiPlugin",
                     "TensorShardStrategy", "ZeroOptimizer"), _ZERO),
    **dict.fromkeys(("Booster", "HybridParallelPlugin"), "pla.launch(config) and pla.initialize"),
    "get_dataloader": "pla.datasets.DataLoader(dataset, batch_size)",
    "clip_grad_norm_fp32": "pla.parallel.clip_gradient_norm, or the configuration's clip_grad_norm",
    **dict.fromkeys(("save_checkpoint", "load_checkpoint"), _CHECKPOINTS),
    "MultiTimer": "pla.trace",
    "hooks": "pla.Hook, with LogHook, EvaluateHook, EarlyStopHook, CheckpointHook, ProgressHook and RunHook of pla",
    "CosineAnnealingLR": "pla.optim.schedules.Cosine in a pla.optim.Scheduler",
    "CosineAnnealingWarmupLR": "pla.optim.schedules.WarmUp(steps, pla.optim.schedules.Cosine(steps))",
    "LinearWarmupLR": "pla.optim.schedules.WarmUp(steps, pla.optim.schedules.Linear(steps))",
    "Lamb": "pla.optim.LAMB",
    "Lars": "pla.optim.LARS",
    **dict.fromkeys(("HybridAdam", "FusedAdam", "CPUAdam"), "pla.optim.AdamW"),
    "FusedSGD": "pla.optim.SGD",
    # Megatron-LM
    **dict.fromkeys(("parallel_state", "mpu", "initialize_model_parallel", "get_tensor_model_parallel_rank"), _MESH),
    "TransformerLayer": "nn.TransformerBlock(…, mesh.scheme, mesh.grid)",
    "get_forward_backward_func": "pla.PipelineSchedule(4).forward_backward_step(engine, data_iter)",
    "checkpoint": f"for activations nn.recompute(module); for files {_CHECKPOINTS}",
    # DeepSpeed
    **dict.fromkeys(("init_distributed", "init_process_group"), _LAUNCH),
    "PipelineModule": "pla.pipeline.build_pipeline_model(model), or pla.initialize on a mesh with a pipeline",
    "LayerSpec": "pla.pipeline.build_pipeline_model_from_cfg(layers)",
    "DeepSpeedEngine": "pla.Engine, which pla.initialize returns",
    # PyTorch
    **dict.fromkeys(("DistributedDataParallel", "DDP", "DataParallel"), _WRAP),
    **dict.fromkeys(("FullyShardedDataParallel", "FSDP", "fully_shard", "ZeroRedundancyOptimizer"), _ZERO),
    "DTensor": "pla.DistArray, and pla.Tensor with a derivative",
    "distribute_tensor": "pla.distribute(array, grid, layout)",
    "distribute_module": "modules declared with mesh.scheme and mesh.grid",
    "parallelize_module": "modules declared with mesh.scheme and mesh.grid",
    "init_device_mesh": 'pla.launch(config), or pla.Grid({"data": 2, "t": 2}) for arrays',
    "DeviceMesh": 'pla.launch(config), or pla.Grid({"data": 2, "t": 2}) for arrays',
    **dict.fromkeys(("Shard", "Replicate", "Placement"), _LAYOUT),
    "Partial": 'pla.Layout(None, partial="t")',
    **dict.fromkeys(("ColwiseParallel", "RowwiseParallel"), _LINEAR),
    "SequenceParallel": 'the configuration\'s parallel=dict(tensor=dict(mode="1d", sequence_parallel=True))',
    "DistributedSampler": "pla.datasets.DataLoader(dataset, batch_size): each rank reads its own rows",
    "RandomSampler": "pla.datasets.Sampler",
    "TensorDataset": "a list of pairs (input, label), or any object with __len__ and __getitem__",
    "default_collate": "pla.datasets.collate",
    "clip_grad_norm_": "pla.parallel.clip_gradient_norm, or the configuration's clip_grad_norm",
    "clip_grad_value_": "the configuration's clip_grad_value",
    "ScheduleGPipe": 'pla.PipelineSchedule(4, "gpipe")',
    "Schedule1F1B": 'pla.PipelineSchedule(4, "1f1b")',
    "ScheduleInterleaved1F1B": "pla.InterleavedPipelineSchedule(4, 2)",
    "PipelineStage": "pla.pipeline.build_by_hand(module)",
    "functional": "pla.ops: functions with derivatives",
    "F": "pla.ops: functions with derivatives",
    "manual_seed": "model.initialize(seed), or the configuration's seed",
    "barrier": "mesh.world.barrier()",
    "all_reduce": "redistribute(layout), where a layout with partial axes becomes one without",
    "all_gather": "redistribute(layout), to one that an axis does not cut",
    "get_rank": "mesh.world.rank, or mesh.rank(…) along a dimension",
    "get_world_size": "mesh.world.size, or mesh.size(…) along a dimension",
    "tensor": "pla.Tensor(pla.distribute(array, grid, layout))",
}  # fmt: skip


def key_hint(name: str) -> str:
    """Return a sentence on an unknown key of a configuration; empty where no other library has it either."""
    found = KEYS.get(name)
    return "" if found is None else f"here it is {found}.  "


def missing(module: str, later: Mapping[str, str] = {}) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, whose AttributeError gives the counterpart here of another library's name.

    `from module import name` turns an AttributeError into an ImportError of its own: it gets one that says the same.

    Parameters
    ----------
    module : str
    later : mapping of str to str
        Names that are imported when they are first asked for, and the modules within this one that have them; "" for
        modules within it themselves.
    """

    def __getattr__(name: str) -> Any:
        if name in later:
            own = importlib.import_module(f"{module}.{later[name] or name}")
            value = getattr(own, name) if later[name] else own
            setattr(sys.modules[module], name, value)
            return value
        found = NAMES.get(name)
        caller: Any = sys._getframe(1)
        if found is not None:
            text = f"{module} has no {name!r}; here it is {found}"
            if caller.f_code.co_name == "_handle_fromlist" and find_spec(f"{module}.{name}") is None:
                raise ImportError(text, name=module)
            raise AttributeError(text, name=name)
        near = (
            [] if name.startswith("_") else difflib.get_close_matches(name, {*vars(sys.modules[module]), *later}, n=1)
        )
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""), name=name
        )

    return __getattr__
