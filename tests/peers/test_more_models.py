"""BERT, ViT, Mixtral and Qwen2-MoE from folders that `transformers` writes, and back."""

from __future__ import annotations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, schemes
from tests.peers.encoders import COMMON, inputs
from tests.training import sizes_for

pytestmark = [pytest.mark.ranks(1, full=(2, 4)), pytest.mark.timeout(120)]
TEXT = {"vocab_size": 11, "max_position_embeddings": 9}
#: Our model, the classes of `transformers`, its settings.
CASES = {
    "bert": ("BertEncoder", "BertConfig", "BertModel", {**COMMON, **TEXT, "type_vocab_size": 2}),
    "masked bert": ("BertEncoder", "BertConfig", "BertForMaskedLM", {**COMMON, **TEXT, "hidden_act": "gelu_new"}),
    "vit": ("ViT", "ViTConfig", "ViTForImageClassification",
            {**COMMON, "image_size": [6, 9], "patch_size": [3, 3], "num_channels": 2, "num_labels": 5}),
    "mixtral": ("Mixtral", "MixtralConfig", "MixtralForCausalLM",
                {**TEXT, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 20,
                 "num_key_value_heads": 2, "num_local_experts": 5, "initializer_range": 0.3, "bos_token_id": None,
                 "eos_token_id": None, "pad_token_id": None}),
}  # fmt: skip
for normalized in (False, True):
    CASES[f"qwen2 moe, {normalized}"] = (
        "Qwen2Moe", "Qwen2MoeConfig", "Qwen2MoeForCausalLM",
        {**{k: v for k, v in CASES["mixtral"][3].items() if k != "num_local_experts"}, "num_experts": 5,
         "num_experts_per_tok": 3, "norm_topk_prob": normalized, "moe_intermediate_size": 8,
         "shared_expert_intermediate_size": 13, "qkv_bias": normalized},
    )  # fmt: skip
for top in (1, 3):
    CASES[f"mixtral {top}"] = (*CASES["mixtral"][:3], {**CASES["mixtral"][3], "num_experts_per_tok": top})
MIXTURES = ("mixtral", "qwen2 moe")
CLOSE = {"float64": 1e-10, "float32": 1e-5}
RUNS = [
    ("bert", "2d", "float64"), ("masked bert", "data", "float64"), ("vit", "1d", "float64"), ("vit", "2d", "float64"),
    ("mixtral", "2d", "float32"), ("mixtral", "data", "float32"), ("mixtral", "1d", "float32"),
    ("qwen2 moe, False", "2d", "float32"), ("qwen2 moe, True", "1d", "float32"), ("qwen2 moe, True", "data", "float32"),
    ("mixtral 1", "1d", "float32"), ("mixtral 3", "2d", "float32"),
]  # fmt: skip


def computed(torch, model, case):
    """What `transformers` gives."""
    with torch.no_grad():
        if case.startswith(MIXTURES):
            return model(torch.tensor(inputs("bert")["input_ids"])).logits
        given = {name: torch.tensor(a) for name, a in inputs("vit" if case == "vit" else "bert").items()}
        del given["weights"]
        if case == "vit":
            return model(pixel_values=given["pixel_values"].to(model.dtype)).logits
        return (model if case == "bert" else model.bert)(**given).last_hidden_state


def made_by(torch, case, folder, dtype):
    import transformers

    torch.manual_seed(0)
    _, config, kind, settings = CASES[case]
    model = getattr(transformers, kind)(getattr(transformers, config)(**settings)).to(getattr(torch, dtype)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    np.save(folder / "want.npy", computed(torch, model, case).numpy())


def result(model, case):
    if case == "vit":
        return model(pla.distribute(inputs("vit")["pixel_values"], model.grid, model.images_layout)).gather()
    given = inputs("bert")
    args = [
        pla.distribute(given[n], model.grid, model.ids_layout)
        for n in ("input_ids", "attention_mask", "token_type_ids")
    ]
    return (model(args[0]) if case.startswith(MIXTURES) else model(*args)).gather()


@pytest.mark.parametrize(("case", "name", "dtype"), RUNS)
def test_results_and_back(case, name, dtype, torch, on_root, peer_folder, make_grid, world):
    folder = peer_folder / f"more-{case}-{name}".replace(" ", "-")
    on_root(lambda: (folder.mkdir(), made_by(torch, case, folder, dtype)))
    scheme, kind = schemes.discover()[name].SCHEME, getattr(nn, CASES[case][0])
    grid = make_grid(sizes_for(scheme, world.size, 1)[0])
    model = kind.from_pretrained(folder, scheme, grid)
    assert model.dtype == dtype
    want = np.load(folder / "want.npy")
    np.testing.assert_allclose(result(model, case), want, rtol=0, atol=CLOSE[dtype] * np.abs(want).max())
    model.save_pretrained(folder / "back")
    again = kind.from_pretrained(folder / "back", scheme, grid)
    assert again.config == model.config
    assert all(np.array_equal(p.block, q.block) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    on_root(lambda: reads(torch, case, folder, dtype))


def reads(torch, case, folder, dtype):
    """`transformers` reads what we write, and computes the same with it."""
    import transformers

    kind = "BertModel" if case == "masked bert" else CASES[case][2]
    options = {"add_pooling_layer": False} if kind == "BertModel" else {}
    back, said = getattr(transformers, kind).from_pretrained(
        folder / "back", output_loading_info=True, dtype=getattr(torch, dtype), **options
    )
    assert not any(said.values()), said
    got = computed(torch, back.eval(), "bert" if kind == "BertModel" else case).numpy()
    # torch's convolutions differ in the last bits from load to load, by where their arrays lie
    np.testing.assert_allclose(got, np.load(folder / "want.npy"), rtol=100 * float(np.finfo(got.dtype).eps))


def test_what_is_not_the_same_is_refused(on_root, peer_folder, torch, make_grid, world):
    import json

    folder = peer_folder / "refused"
    on_root(lambda: (folder.mkdir(), made_by(torch, "mixtral", folder, "float32")))
    scheme = schemes.for_mode("2d").SCHEME
    grid = make_grid(sizes_for(scheme, world.size, 1)[0])
    with pytest.raises(pla.ConfigError, match=r"model_type='mixtral' is read by nn\.Mixtral, not nn\.Llama"):
        nn.Llama.from_pretrained(folder, scheme, grid)
    path = folder / "config.json"
    on_root(lambda: path.write_text(json.dumps({**json.loads(path.read_text()), "num_experts_per_tok": 6})))
    with pytest.raises(pla.ConfigError, match="num_experts_per_tok=6 with num_local_experts=5"):
        nn.Mixtral.from_pretrained(folder, scheme, grid)
