"""Launches Triton kernels with little host time. The first launch with arguments of some kind is Triton's own (25 us);
later ones call the function of Triton's launcher with the compiled kernel, which is kept by a key."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton import knobs
from triton.runtime import JITFunction, driver

log = logging.getLogger("kernels")

Grid = tuple[int, ...]
"""The number of programs along one, two or three axes."""
Key = tuple[Hashable, ...]
MakeKey = Callable[..., Key]
"""Returns the key of a launch, under which a `Launcher` keeps the kernel, from a device's number and the arguments."""

FLAT, PACKED = "flat", "packed"
FORMS = {"3.6": FLAT, "3.7": PACKED, "3.8": PACKED, "3.9": PACKED}
"""How the launcher of each known version of Triton takes a kernel's arguments: one by one, or in one tuple."""
FORM: str | None = FORMS.get(".".join(triton.__version__.split(".")[:2]))
"""The form of the installed Triton. None means that it is not known, and that every launch is Triton's own."""
MIN_INT, MAX_INT = -(2**31), 2**31 - 1
MOST_KEYS = 4096
"""Compiled kernels kept by a `Launcher`. If integers vary more than that, it forgets all, and finds them again."""

# The key tells apart at least what Triton tells apart: constants and launch options by name, type and value, classes
# and dtypes of arguments, pointers that are multiples of 16, integers' values (unspecialised ones: whether they fit
# into 32 bits), and the device. Triton's settings count only before a kernel's first launch.


class Ready(NamedTuple):
    """A compiled kernel, ready to be launched."""

    launch: Callable[..., None]
    """Takes grid x, y, z and the stream, then `fixed`, then the kernel's arguments."""
    fixed: tuple[Any, ...]
    """The arguments that are the same for each launch, such as the driver's handle."""
    tail: tuple[Any, ...]
    """The constants, which `launch` takes after the other arguments and ignores."""


class Launcher:
    """A kernel with its constants and launch options, which follow the arguments of `__call__` in its parameters.
    Triton itself launches other kernels, and those with other arguments than tensors, integers and floats."""

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self._kernel, self._constants = kernel, constants
        self._is_direct = FORM is not None and isinstance(kernel, JITFunction) and _constants_come_last(kernel)
        self._make_keys: dict[tuple[type, ...], MakeKey | None] = {}
        self._ready: dict[Key, Ready] = {}

    def __call__(self, grid: Grid, *args: Any) -> None:
        """Launch the kernel with `args`, on the current device and stream. Compiles it if these arguments need it."""
        make_key = self._make_key(args) if self._is_direct else None
        if make_key is None or knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
            self.launch_by_triton(grid, *args)
            return
        active = driver.active
        device = active.get_current_device()
        key = make_key(device, *args)
        ready = self._ready.get(key)
        if ready is None:
            self._launch_first(key, grid, args)
            return
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        launch, fixed, tail = ready
        if FORM is PACKED:
            launch(x, y, z, active.get_current_stream(device), *fixed, (*args, *tail))
        else:
            launch(x, y, z, active.get_current_stream(device), *fixed, *args, *tail)

    def launch_by_triton(self, grid: Grid, *args: Any) -> None:
        """Launch the kernel as Triton does, which takes the host several times longer."""
        self._kernel[grid](*args, **self._constants)

    def _make_key(self, args: tuple[Any, ...]) -> MakeKey | None:
        """Return the function that makes keys of launches whose arguments have the classes of `args`. None means that
        Triton has to launch them."""
        classes = tuple(map(type, args))
        if classes not in self._make_keys:
            self._make_keys[classes] = key_function(self._kernel, classes)
        return self._make_keys[classes]

    def _launch_first(self, key: Key, grid: Grid, args: tuple[Any, ...]) -> None:
        """Let Triton launch the kernel, and keep the compiled kernel, unless `_find_launch` says that Triton has to
        launch it each time."""
        compiled = self._kernel.run(*args, grid=grid, warmup=False, **self._constants)
        ready = _find_launch(self._kernel, compiled, self._constants)
        if ready is None:
            self._is_direct = False
            return
        if len(self._ready) >= MOST_KEYS:
            self._ready.clear()
        self._ready[key] = ready


_launchers: dict[Key, Launcher] = {}


def with_constants(kernel: Any, **constants: Any) -> Launcher:
    """Return the launcher of a kernel with these constants and launch options, the same one each time. Under the
    interpreter and with unknown versions of Triton, it launches as `kernel[grid](*args, **constants)` does."""
    # The launcher keeps the kernel alive, so that its id stays its own.
    key = (id(kernel), *constants, *constants.values(), *map(type, constants.values()))
    found = _launchers.get(key)
    if found is None:
        if FORM is None and not _launchers:
            log.warning("Triton %s is not known: each launch takes some 20 us longer", triton.__version__)
        found = _launchers[key] = Launcher(kernel, constants)
    return found


def _constants_come_last(kernel: Any) -> bool:
    flags = [param.is_constexpr for param in kernel.params]
    return flags == sorted(flags)


def key_function(kernel: Any, classes: tuple[type, ...]) -> MakeKey | None:
    """Return a function that makes the key of a launch from the device's number and arguments of `classes`. None means
    that there are arguments of other classes than tensors, integers and floats, or not as many as the kernel takes."""
    params = [param for param in kernel.params if not param.is_constexpr]
    if len(params) != len(classes) or not all(issubclass(each, Tensor) or each in (int, float) for each in classes):
        return None
    known = [
        (place, param.do_not_specialize, each) for place, (param, each) in enumerate(zip(params, classes, strict=True))
    ]
    tensors = [place for place, _, each in known if issubclass(each, Tensor)]
    pointers = [place for place, is_free, each in known if issubclass(each, Tensor) and not is_free]
    exact = [place for place, is_free, each in known if each is int and not is_free]
    ranged = [place for place, is_free, each in known if each is int and is_free]

    def make_key(device: int, *args: Any) -> Key:
        addresses, bits = [args[place].data_ptr() for place in pointers], 0
        for address in addresses:
            bits |= address
        unaligned = bits & 15 and tuple([address & 15 == 0 for address in addresses])
        dtypes = [args[place].dtype for place in tensors]
        wide = [None if MIN_INT <= args[place] <= MAX_INT else args[place] for place in ranged]
        return (device, classes, unaligned, *dtypes, *[args[place] for place in exact], *wide)

    return make_key


def _find_launch(kernel: Any, compiled: Any, constants: dict[str, Any]) -> Ready | None:
    """Return how to launch a compiled kernel directly. None means that Triton has to launch it, because it needs memory
    that is allocated for each launch, or its arguments are changed before each launch."""
    launcher = compiled.run
    needs_memory = launcher.global_scratch_size or launcher.profile_scratch_size
    if needs_memory or getattr(launcher, "gsan_enabled", False) or hasattr(launcher.launch, "__closure__"):
        return None
    given = {param.name: param.default for param in kernel.params if param.is_constexpr} | constants
    tail = tuple(given[param.name] for param in kernel.params if param.is_constexpr)
    start = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl)
    facts = (compiled.packed_metadata, None, None, None)
    no_memory = (None, None)
    if FORM is FLAT:
        return Ready(launcher.launch, (*start, *no_memory, *facts), tail)
    return Ready(
        launcher.launch, (*start, *facts, *no_memory, launcher.arg_annotations, launcher.kernel_signature), tail
    )
