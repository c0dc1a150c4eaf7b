"""A recorder for a CPU: what is recorded is called again, and must launch what it launched then, argument by argument.
That is what a CUDA graph does, whether it is right or not. For processes in which Triton's kernels are interpreted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from engine.model.steps.graphs import Replay

WAITING = ("aten.item", "_local_scalar_dense", "nonzero", "aten.equal")
"""Operations whose result the host must wait for."""


class Launches(TorchDispatchMode):
    """Notes calls, in order: torch's operations, except views, and Triton's kernels, with shapes of tensors and other
    arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self._is_in_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_in_kernel and not func.is_view:
            self.calls.append((str(func), _plain(args)))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def kernels(self, *, run: bool = True) -> Iterator[None]:
        """Note the launches of kernels, too, which compute nothing without `run`."""
        launch = GridExecutor.__call__

        def noted(executor: Any, *args: Any, **kwargs: Any) -> None:
            self.calls.append((executor.fn.__name__, _plain((executor.grid, args, kwargs))))
            if run:
                self._is_in_kernel = True
                launch(executor, *args, **kwargs)
                self._is_in_kernel = False

        with patch.object(GridExecutor, "__call__", noted), self:
            yield


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else str(value)


class Rerun:
    """`LaunchRecorder` that calls again what it is given. `replayed`: the number of each record that was.

    Args:
        warms_up: kernels also compute while they are recorded, as in the launch that precedes a capture on a GPU.
    """

    def __init__(self, *, warms_up: bool = False) -> None:
        self.replayed: list[int] = []
        self._count, self._warms_up = 0, warms_up

    def record(self, launch: Callable[[], None]) -> Replay:
        number, recorded = self._count, _launches(launch, run=self._warms_up)
        self._count += 1

        def again() -> None:
            self.replayed.append(number)
            assert _launches(launch) == recorded, "a replay would launch something else"

        return again


def _launches(launch: Callable[[], None], *, run: bool = True) -> list[Any]:
    launches = Launches()
    with launches.kernels(run=run):
        launch()
    assert not any(word in name for name, _ in launches.calls for word in WAITING)
    return launches.calls
