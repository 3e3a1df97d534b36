# ruff: noqa: C408 -- dict(key=value) is how configurations are written
"""A classifier of handwritten digits: `mpiexec -n 4 parlinalg train digits`.

On any number of ranks they form the 2D grid nearest to a square.  Widths and batch divide evenly by none.
"""

parallel = dict(tensor=dict(mode="2d"))  # without a size: all ranks that parallel.data leaves

data = dict(name="digits", test=0.2)
model = dict(name="mlp", hidden=(193, 97), activation="relu")
criterion = dict(name="cross_entropy")
optimizer = dict(name="adamw", lr=8e-3, weight_decay=0.01)
lr_schedule = dict(name="cosine", warmup=10)

dtype = "float32"
seed = 0
batch_size = 127
epochs = 16
