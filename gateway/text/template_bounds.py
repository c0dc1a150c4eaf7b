"""Bounds what a chat template may compute while it renders: steps, and the sizes of the values that it makes.

A rendering cannot be interrupted, and some of its operations hold Python's lock: `{{ n ** n ** n }}` with n = 99999
takes hours. Jinja's sandbox bounds only `range`. Here each operator, call, filter and loop that can make a value larger
is counted before it runs, or right after it where its result is at most some times as large as what it reads. What
reads a list is counted by all that is in it: lists that hold one list twice, some times over, are small until then.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from functools import wraps
from itertools import islice
from typing import Any

from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from gateway.text.counted_template import COMPARED, CONCATENATED, COUNTED, READ, SKIMMED, WRITTEN
from gateway.text.template_budget import CHARACTERS_A_STEP, MOST_STEPS, MOST_WRITTEN, Budget
from gateway.text.template_checks import BOUNDS, CHECKS, GROWING, check_method

INSTANT_FILTERS = frozenset(("count", "d", "default", "first", "last", "length", "random"))
"""Filters that take as long for many members as for few, and make nothing."""
SHALLOW_FILTERS = frozenset(
    ("batch", "items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr")
)
SHALLOW_FILTERS |= {"slice"}
"""Filters that do not read what is in the members of what they are given."""
CONSUMING_FILTERS = frozenset(("groupby", "join", "max", "min", "sort", "sum", "unique"))
"""Filters that read what a generator yields, and what is in it."""
COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}
TESTS = frozenset(
    ("eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge")
)
TESTS |= {">=", "in"}
"""Tests that compare two values."""


class QuietNamespace(Namespace):
    """A namespace whose text leaves out its values: they can contain it, and each other in all orders."""

    def __repr__(self) -> str:
        return "<Namespace>"


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of chat templates with bounds. `bound` makes one of transformers' environment."""

    intercepted_binops = frozenset(("**", "*", "+", "%", "//"))
    budget: Budget

    def bound(self) -> None:
        """Have all filters, loops, comparisons, and what is written counted."""
        self.budget = Budget()
        self.filters = {name: self._bounded(name, function) for name, function in self.filters.items()}
        self.filters |= {COUNTED: self._counted, CONCATENATED: self._joined, COMPARED: self._compared}
        self.filters |= {READ: self._read, SKIMMED: self._skimmed, WRITTEN: self._written}
        tests: Mapping[str, Any] = self.tests
        self.tests = {name: self._bounded_test(name, function) for name, function in tests.items()}
        self.globals.pop("lipsum", None)
        self.globals["namespace"] = QuietNamespace
        self.concat = self._concatenated  # type: ignore[method-assign]

    @contextmanager
    def rendering(self, given: Iterable[Any] = ()) -> Iterator[None]:
        """Give the renderings of this thread in the block one budget together. `given` are values from the caller that
        hold no value twice."""
        self.budget.steps, self.budget.written = MOST_STEPS, MOST_WRITTEN
        self.budget.given = frozenset(map(id, given))
        try:
            yield
        finally:
            del self.budget.steps, self.budget.written, self.budget.given

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        BOUNDS[operator](self.budget, left, right)
        return self.binop_table[operator](left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.budget.step()
        if not isinstance(__obj, Macro):  # what a macro does is counted where it does it
            for one in args if __obj is QuietNamespace else (*args, *kwargs.values()):
                if one.__class__ is not str:
                    __self.budget.read(one)
        check_method(__self.budget, __obj, args)
        value = super().call(__context, __obj, *args, **kwargs)
        if isinstance(value, GROWING):
            __self.budget.write(len(value))
        return value

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that checks its arguments before it runs, if it can widen a text, and counts what it
        makes."""
        budget, check, read = self.budget, CHECKS.get(name), self._reader(name)
        first = 1 if hasattr(function, "jinja_pass_arg") else 0  # before it comes what Jinja passes

        @wraps(function)
        def instant(*args: Any, **kwargs: Any) -> Any:
            budget.step()
            return function(*args, **kwargs)

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            budget.step()
            if name in CONSUMING_FILTERS and isinstance(args[first], Iterator):
                args = (*args[:first], self._counted(args[first]), *args[first + 1 :])
            read(args[first])
            for one in (*args[first + 1 :], *kwargs.values()):
                if one.__class__ is not str:
                    budget.read(one)
            if check is not None:
                check(budget, args, kwargs)
            value = function(*args, **kwargs)
            if isinstance(value, GROWING):
                budget.write(len(value))
            return self._stepping(value) if isinstance(value, Iterator) else value

        return instant if name in INSTANT_FILTERS else counted

    def _reader(self, name: str) -> Callable[[Any], object]:
        """Return what counts that which a filter reads of the value before it."""
        if name == "tojson":
            return id  # its check counts it
        return self.budget.skim if name in SHALLOW_FILTERS else self.budget.read

    def _bounded_test(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a test that counts what it reads, if it reads more than the kind of a value."""
        budget = self.budget

        @wraps(function)
        def compared(left: Any, right: Any) -> Any:
            budget.compare(name, left, right)
            return function(left, right)

        @wraps(function)
        def read(value: Any) -> Any:
            return function(self._read(value))

        return compared if name in TESTS else read if name in ("lower", "upper") else function

    def _stepping(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield items, and count each."""
        for item in items:
            self.budget.step()
            yield item

    def _read(self, value: Any) -> Any:
        """Return a value, and count all that is in it."""
        self.budget.read(value)
        return value

    def _written(self, value: Any) -> Any:
        """Return a value that is written, and count all that is in it. The length of texts is counted with others'."""
        return value if isinstance(value, str) else self._read(value)

    def _skimmed(self, value: Any) -> Any:
        """Return a value, and count its length."""
        if value.__class__ is str and len(value) < CHARACTERS_A_STEP:
            return value
        self.budget.skim(value)
        return value

    def _compared(self, left: Any, name: str, right: Any) -> Any:
        """Return what a comparison says, and count what it reads."""
        self.budget.compare(name, left, right)
        return COMPARISONS[name](left, right)

    def _counted(self, items: Any) -> Any:
        """Return what a loop goes through, and count its turns."""
        if isinstance(items, Sized):
            self.budget.step(len(items))
            return items
        if not isinstance(items, Iterable):
            return items  # the loop itself fails
        most = MOST_STEPS + 1
        found = list(islice(items, most))
        self.budget.step(len(found))
        return found

    def _joined(self, parts: Iterable[Any]) -> str:
        """Return values as one text, as `~` does."""
        return self._concatenated(str(self._read(part)) for part in parts)

    def _concatenated(self, parts: Iterable[str]) -> str:
        """Return texts as one, as the writing of a template does."""
        texts = list(parts)
        self.budget.write(sum(map(len, texts)))
        return "".join(texts)


def bounded_environment(environment: ImmutableSandboxedEnvironment) -> BoundedEnvironment:
    """Make an environment of transformers' a bounded one, in place: nothing else creates one with its extensions."""
    environment.__class__ = BoundedEnvironment
    assert isinstance(environment, BoundedEnvironment)
    environment.bound()
    return environment
