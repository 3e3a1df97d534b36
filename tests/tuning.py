"""Other values of `parlinalg.tunables` in a test, which must take effect."""

from __future__ import annotations

from typing import Any

from parlinalg import tunables

NAMES = frozenset(name for name in vars(tunables) if name.isupper())


class Tuning:
    """The tunables that a test has changed.

    While a name is changed the module does not have it: reading it calls the module's `__getattr__`, which gives the
    test's value and notes that it was read.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.plain: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.read: set[str] = set()
        self.needed: set[str] = set()

    def __call__(self, *, ranks: int = 1, must: bool = True, **values: Any) -> None:
        """Change tunables; again, to change them once more.

        They must be read in the test if it runs on `ranks` and more; with `must=False`, for fixtures of many tests, of
        which some read them, they need not.
        """
        if unknown := values.keys() - NAMES:
            raise AttributeError(f"parlinalg.tunables has no {sorted(unknown)}; it has {sorted(NAMES)}")
        for name in values.keys() - self.plain.keys():
            self.plain[name] = vars(tunables).pop(name)
        self.values.update(values)
        tunables.__getattr__ = self._get  # type: ignore[attr-defined]
        if must and self.size >= ranks:
            self.needed |= values.keys()

    def _get(self, name: str) -> Any:
        if name not in self.values:
            raise AttributeError(f"module {tunables.__name__!r} has no attribute {name!r}")
        self.read.add(name)
        return self.values[name]

    def restore(self) -> None:
        vars(tunables).pop("__getattr__", None)
        vars(tunables).update(self.plain)

    def check(self, world: Any) -> None:
        """Raise on all ranks if a value was read on none."""
        read = set().union(*world.share(sorted(self.read)))
        needed = set().union(*world.share(sorted(self.needed)))
        if ineffective := sorted(needed - read):
            raise AssertionError(f"the test changes {ineffective}, which nothing reads in it")
