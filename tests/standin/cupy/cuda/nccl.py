"""NCCL needs hardware: as with CuPy where libnccl is not installed, it says that it is not there."""

available = False
