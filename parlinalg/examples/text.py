# ruff: noqa: C408 -- dict(key=value) is how configurations are written
"""A small GPT that reads the documentation of Python, byte by byte: `mpiexec -n 4 parlinalg train text`.

On any number of ranks they form the 2D grid nearest to a square.  The text comes with Python; one of your own:
`--set data.path=FILE`.  The model is left in the folder for `parlinalg generate`.
"""

parallel = dict(tensor=dict(mode="2d"))  # without a size: all ranks that parallel.data leaves

data = dict(name="text", sequence_length=128, validation=0.1)
model = dict(name="gpt", hidden_size=128, num_hidden_layers=4, num_attention_heads=4)
criterion = dict(name="cross_entropy")
optimizer = dict(name="muon", lr=0.02, adamw_lr=4e-3, betas=(0.9, 0.99), weight_decay=0.1)
lr_schedule = dict(name="cosine", warmup=40, end=0.05)
sample = dict(prompt="The ", max_new_tokens=400, temperature=0.8, top_p=0.7)

dtype = "float32"
seed = 0
batch_size = 32
steps = 500
clip_grad_norm = 1.0
validate_every = 100
