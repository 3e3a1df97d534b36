"""Write down what CuPy offers: `python tests/standin/record.py > tests/standin/cupy/api.txt`.

Run where the real CuPy is installed; it needs no GPU.  The stand-in refuses whatever is not in the list.
"""

import inspect
import re
import sys
from typing import Any

import cupy
import numpy


def parameters(text: str) -> str:
    """The parameters of a signature, with types dropped and every default written 0."""
    out = []
    for part in re.sub(r"\([^()]*\)|\[[^][]*\]|'[^']*'|<[^>]*>", "0", text).split(","):
        name, default, _ = part.partition("=")
        words = name.partition(":")[0].split()
        out += [words[-1] + ("=0" if default else "")] if words else []
    return ", ".join(p for p in out if p != "self")


def loop(op: Any) -> str:
    """A loop's dtypes, as `ff->f`; `??->!` is one that raises an error."""
    taken, made = ("".join(numpy.dtype(t).char for t in types) for types in (op.in_types, op.out_types))
    return f"{taken}->{'!' if op.error_func else made}"


def main() -> None:
    if "standin" in cupy.__file__:
        sys.exit("this is the stand-in; run where CuPy itself is installed")
    print(f"# CuPy {cupy.__version__}, the names it shares with NumPy {numpy.__version__}")
    for prefix, theirs, ours in (
        ("", cupy, numpy),
        ("linalg.", cupy.linalg, numpy.linalg),
        ("fft.", cupy.fft, numpy.fft),
    ):
        for name in sorted(n for n in dir(theirs) if not n.startswith("_") and hasattr(ours, n)):
            thing = getattr(theirs, name)
            if isinstance(thing, cupy.ufunc):
                print("ufunc", prefix + name, thing.nin, thing.nout, ",".join(map(loop, thing._ops.ops)))
            elif inspect.isclass(thing) or not callable(thing):
                if not inspect.ismodule(thing) and thing is getattr(ours, name):
                    print("same", prefix + name)
            else:
                try:
                    signature = inspect.signature(thing)
                except ValueError:
                    print("function", prefix + name, "(*args, **kwargs)")
                else:
                    signature = signature.replace(return_annotation=inspect.Signature.empty)
                    print("function", prefix + name, f"({parameters(str(signature)[1:-1])})")
    for name in sorted(n for n in dir(cupy.ndarray) if not n.startswith("_")):
        thing = getattr(cupy.ndarray, name)
        if not callable(thing):
            print("attribute", name)
            continue
        found = re.match(r"[\w.]+\((.*)\)", (thing.__doc__ or "").split("\n")[0])
        print("method", name, f"({parameters(found.group(1))})" if found else "(*args, **kwargs)")


if __name__ == "__main__":
    main()
