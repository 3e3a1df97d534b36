"""CuPy's bindings of CUDA's libraries, as far as the library calls them itself."""
