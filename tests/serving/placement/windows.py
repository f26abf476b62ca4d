"""A listener that keeps closed windows."""

from gimbal_jax.serving.placement.records import ClosedWindow


class Windows:
    lost = 0

    def __init__(self) -> None:
        self.closed: list[ClosedWindow] = []

    @property
    def written(self) -> int:
        return len(self.closed)

    def write(self, window: ClosedWindow) -> None:
        self.closed.append(window)
