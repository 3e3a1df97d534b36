"""The schema of configurations: sections of typed keys, the checks of their values, and `--set`.  Pure.

A section is a frozen dataclass whose fields are declared by `key`, each with its default, its check and a line of
documentation.  Unknown-key errors, `--set` and the tables of the guide follow from these declarations.

A check is a function of where a value stands (such as "parallel.tensor.size") and the value; it returns the value in
the form that the library uses, or raises a ConfigError that says what would be right.
"""

from __future__ import annotations

import ast
import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from operator import index
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

from parlinalg import hints
from parlinalg.errors import ConfigError, brief

Check = Callable[[str, Any], Any]
MOST = 1 << 53  # float64 represents all whole numbers up to here


# ---------------------------------------------------------------------------------------------- sections and keys
class Short(NamedTuple):
    """A short form of a section: the type of the value, the key that it is the value of, and its meaning."""

    type: type
    key: str
    meaning: str


def key(default: Any, check: Check | type[Section], doc: str, shown: str | None = None) -> Any:
    """Declare a key of a section.

    Parameters
    ----------
    default : object
        A key whose default is None may be given as None.
    check : check or Section subclass
        A subclass of `Section`: the value is a section itself.
    doc : str
        What the key means, as the table of the guide has it (Markdown).
    shown : str, optional
        The default as that table has it, by default `default` itself.
    """
    found = {"check": check, "doc": doc, "shown": shown}
    return field(default=default, metadata=found)


def section(kind: type[Section], doc: str, shown: str | None = None) -> Any:
    """Declare a key whose value is a section, by default that of all defaults."""
    return key(kind(), kind, doc, shown)


@dataclass(frozen=True)
class Section:
    """The base of all sections."""

    SHORT: ClassVar[Short | None] = None

    @classmethod
    def parse(cls, where: str, value: object) -> Self:
        """Return the section that a dict of its keys, or its short form, stands for.

        Parameters
        ----------
        where : str
            The name of the section in messages, such as "parallel.tensor"; "" for the whole configuration.
        value : dict, short form or None
            None stands for the defaults.

        Raises
        ------
        ConfigError
            If a key is unknown or a value is wrong.
        """
        if isinstance(value, cls):
            return value
        known = [f.name for f in fields(cls)]
        given = {} if value is None else cls.expand(value)
        if not isinstance(given, Mapping):
            short = "" if cls.SHORT is None else f", or {cls.SHORT.meaning}"
            raise refuse(where or "a configuration", value, f"a dict with the keys {', '.join(known)}{short}")
        check_keys(where or "the configuration", given, known)
        inner = f"{where}." if where else ""
        made = cls(**{name: cls.check_key(inner, name, given[name]) for name in known if name in given})
        made.check(where)
        return made

    @classmethod
    def expand(cls, value: object) -> object:
        """Return the dict that a short form stands for; other values as they are."""
        short = cls.SHORT
        if short is None or not isinstance(value, short.type) or isinstance(value, bool):
            return value
        return {short.key: value}

    @classmethod
    def check_key(cls, prefix: str, name: str, value: object) -> Any:
        """Return the checked value of one key; `prefix` stands before its name in messages."""
        declared = next(f for f in fields(cls) if f.name == name)
        check = declared.metadata["check"]
        if value is None and declared.default is None:
            return None
        inner = _as_section(check)
        return check(f"{prefix}{name}", value) if inner is None else inner.parse(f"{prefix}{name}", value)

    def check(self, where: str) -> None:
        """Raise a ConfigError if keys contradict each other; a subclass overrides it."""

    def given(self) -> dict[str, Any]:
        """Return the keys that differ from their defaults, in plain dicts."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {name: v.given() if isinstance(v, Section | Choice) else v for name, v in found.items()}


def _as_section(check: object) -> type[Section] | None:
    """Return the section that is given in place of a check, if it is one."""
    return check if isinstance(check, type) and issubclass(check, Section) else None


def documentation(kind: type[Section]) -> list[tuple[str, str, str]]:
    """Return for every key of a section its name, its meaning and its default, in Markdown."""
    rows = []
    for f in fields(kind):
        default = "" if f.default is None else f"`{f.default!r}`".replace("'", '"')
        shown = f.metadata["shown"]
        rows.append((f"`{f.name}`", f.metadata["doc"], default if shown is None else shown))
    return rows


# ---------------------------------------------------------------------------------------------- values of --set
def value_of(text: str) -> Any:
    """Return the value that a text on the command line stands for: a Python literal or `dict(a=1)`, else the text.

    >>> value_of("4"), value_of("2.5d"), value_of("(1, 3)"), value_of("dict(size=4)")
    (4, '2.5d', (1, 3), {'size': 4})
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return ast.literal_eval(_Dicts().visit(tree))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


class _Dicts(ast.NodeTransformer):
    """Rewrites `dict(a=1)` to `{"a": 1}`, which is a literal."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        names = [k.arg for k in node.keywords]
        if isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args and None not in names:
            return ast.Dict(keys=[ast.Constant(n) for n in names], values=[k.value for k in node.keywords])
        return node


def override(kind: type[Section], values: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return the values of a section with some replaced, by settings such as "optimizer.lr=0.01", in their order.

    A dict that is missing on the way is made, and a short form becomes the dict that it stands for: `parallel.tensor`
    a size, `zero` a stage, `optimizer` a name.

    Raises
    ------
    ConfigError
        If a setting is not of the form key.key=value, or goes through a value that is no dict, or a dict holds itself.
    """
    result = _copied(values)
    for setting in [settings] if isinstance(settings, str) else settings:
        if not isinstance(setting, str):
            raise ConfigError(f"settings are texts such as 'parallel.tensor.mode=2d', not {setting!r}")
        path, equals, text = setting.partition("=")
        keys = [name.strip() for name in path.split(".")]
        if not equals or not all(keys):
            raise ConfigError(f"--set takes KEY=VALUE, such as --set parallel.tensor.mode=2d, not {setting!r}")
        at, inner = result, _as_section(kind)
        for depth, name in enumerate(keys[:-1]):
            declared = {} if inner is None else {f.name: f.metadata["check"] for f in fields(inner)}
            inner = _as_section(declared.get(name))
            value = at.get(name)
            value = {} if value is None else value if inner is None else inner.expand(value)
            value = {"name": value} if isinstance(value, str) else value
            if not isinstance(value, dict):
                raise ConfigError(
                    f"--set {setting}: {'.'.join(keys[: depth + 1])} is {value!r}, without keys; replace it altogether"
                )
            at[name] = value
            at = value
        at[keys[-1]] = value_of(text)
    return result


def _copied(values: Mapping[str, Any], path: tuple[str, ...] = (), outer: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Return a dict, and those within it, as new ones; raise a ConfigError if one contains itself."""
    for depth, known in enumerate(outer):
        if known is values:
            which = f"the dict {'.'.join(path[:depth])}" if depth else "the configuration"
            raise ConfigError(f"{'.'.join(path)} is {which} itself: a dict cannot contain itself")
    return {
        name: _copied(value, (*path, str(name)), (*outer, values)) if isinstance(value, Mapping) else value
        for name, value in values.items()
    }


# ---------------------------------------------------------------------------------------------- checks
@dataclass(frozen=True)
class Choice:
    """One of several named things, such as an optimizer, and its options, which are its own keyword arguments."""

    name: str
    options: Mapping[str, Any]

    def given(self) -> dict[str, Any]:
        """Return the dict that it was chosen by."""
        return {"name": self.name, **self.options}

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"


class Kind(NamedTuple):
    """A thing that may be chosen: the function that makes it, the checks of its options, and defaults of its own."""

    make: Callable[..., Any]
    options: Mapping[str, Check]
    defaults: Mapping[str, Any] = MappingProxyType({})


def refuse(where: str, value: object, right: str) -> ConfigError:
    """Return the error of a value that is not what it should be."""
    return ConfigError(f"{where} must be {right}, not {brief(value)}")


def named(value: object) -> str:
    """Return a plain value as text, and of any other the name of its type."""
    if isinstance(value, str | int | float | Path | Mapping):
        return brief(value)
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def check_keys(where: str, given: Iterable[object], known: Iterable[str]) -> None:
    """Raise a ConfigError that names the first unknown key, the nearest right one, and all that are known."""
    keys = list(known)
    for key in given:
        if key not in keys:
            near = difflib.get_close_matches(str(key), keys, n=1)
            hint = hints.key_hint(str(key)) or (f"did you mean {near[0]!r}?  " if near else "")
            raise ConfigError(f"{where} has an unknown key {key!r}: {hint}The known ones are {', '.join(keys)}")


def check_values(where: str, given: Any, checks: Mapping[str, Check]) -> None:
    """Raise a ConfigError unless a dict has values that pass these checks, or a KeyError if it lacks one."""
    if not isinstance(given, Mapping):
        raise refuse(where, given, f"a dict with the keys {', '.join(checks)}")
    for name, check in checks.items():
        check(f"{where}.{name}" if where else name, given[name])


def choice(kinds: Mapping[str, Kind], default: str | None = None) -> Check:
    """Return a check of one of several named things: a dict with its name and options, or the name alone.

    Parameters
    ----------
    kinds : dict of str to Kind
        By name.
    default : str, optional
        The name where only options are given.
    """

    def check(where: str, value: Any) -> Choice:
        given = {"name": value} if isinstance(value, str) else value.given() if isinstance(value, Choice) else value
        if not isinstance(given, Mapping):
            raise refuse(where, value, f"a dict with a name, one of {listed(kinds)}")
        name = given.get("name", default)
        if name is None:
            raise ConfigError(f"{where} needs a name, one of {listed(kinds)}")
        if not isinstance(name, str) or name not in kinds:
            raise refuse(f"{where}.name", name, f"one of {listed(kinds)}")
        options = {option: v for option, v in given.items() if option != "name"}
        known = kinds[name].options
        check_keys(f"{where} ({name})", options, known)
        return Choice(name, {option: known[option](f"{where}.{option}", v) for option, v in options.items()})

    return check


def integer(least: int, most: int = MOST) -> Check:
    """Return a check of a whole number from `least` to `most`."""

    def check(where: str, value: Any) -> int:
        try:
            found = None if isinstance(value, bool) else index(value)
        except TypeError:
            found = None
        if found is None or not least <= found <= most:
            above = most != MOST or (found is not None and found > most)
            raise refuse(where, value, f"a whole number of at least {least}" + f" and at most {most:,}" * above)
        return found

    return check


def real(least: float, most: float = math.inf, *, above: bool = False, below: bool = False) -> Check:
    """Return a check of a number from `least` to `most`; `above` and `below` exclude the ends."""
    lower = f"above {least:g}" if above else f"of at least {least:g}"
    upper = "" if most == math.inf else f" and below {most:g}" if below else f" and at most {most:g}"

    def check(where: str, value: Any) -> float:
        good, number = not isinstance(value, bool) and hasattr(value, "__float__"), math.nan
        with suppress(TypeError, ValueError, OverflowError):
            number = float(value) if good else number
        edge = (above and number == least) or (below and number == most)
        if not math.isfinite(number) or not least <= number <= most or edge:
            raise refuse(where, value, f"a number {lower}{upper}")
        return number

    return check


def flag(where: str, value: Any) -> bool:
    """Check that a value is True or False."""
    if value is not True and value is not False:
        raise refuse(where, value, "True or False")
    return value


def text(where: str, value: Any) -> str:
    """Check that a value is a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise refuse(where, value, "a text")
    return value


def encodable(where: str, value: Any) -> str:
    """Check that a value is a text that is not empty, of characters that UTF-8 has: tokenizers take its bytes."""
    found = text(where, value)
    try:
        found.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{where} must be a text in UTF-8, not {found!a}, which has half of a surrogate pair"
        ) from None
    return found


def one_of(*values: object) -> Check:
    """Return a check of one of a few values."""

    def check(where: str, value: Any) -> Any:
        if not any(value is v or (type(value) is type(v) and value == v) for v in values):
            raise refuse(where, value, f"one of {listed(values)}")
        return value

    return check


def several(check: Check, length: int | None = None, least: int = 0) -> Check:
    """Return a check of a sequence whose every item passes `check`."""

    def check_all(where: str, value: Any) -> tuple[Any, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise refuse(where, value, "a list or tuple" + (f" of {length}" if length else ""))
        if (length is not None and len(value) != length) or len(value) < least:
            raise refuse(where, value, f"a list or tuple of {length or f'at least {least}'}")
        return tuple(check(f"{where}[{i}]", item) for i, item in enumerate(value))

    return check_all


def optional(check: Check) -> Check:
    """Return a check that also accepts None."""

    def check_or_none(where: str, value: Any) -> Any:
        return None if value is None else check(where, value)

    return check_or_none


def listed(values: Iterable[object]) -> str:
    """Return values as text: "'a', 'b' or 'c'"."""
    texts = [repr(v) for v in values]
    return " or ".join(filter(None, [", ".join(texts[:-1]), texts[-1]])) if texts else "nothing"


def listed_divisors(n: int) -> str:
    """Return the divisors of a number as text: "1, 2 or 4"."""
    return listed(d for d in range(1, n + 1) if n % d == 0)
