"""Short ways to say what a dispatcher sees."""

from dataclasses import replace

from hypothesis import strategies as st

from gimbal_jax.scheduler.dispatch_decision import View
from gimbal_jax.scheduler.trace import Trace, idle_trace

BUDGET = 1000


def trace(engine: int = 0, time: float = 0.0, **fields) -> Trace:
    return replace(idle_trace(engine, time), **fields)


def view(*traces: Trace | None, **fields) -> View:
    """A view of these engines; what is not given is zero."""
    zeros = (0,) * len(traces)
    nothing = View(
        traces,
        compensation_S=zeros,
        picks_S=zeros,
        picked_tokens_S=zeros,
        in_flight_S=zeros,
        turn=0,
        choices=0,
        now=0.0,
        prompt_tokens=1,
        cached_tokens_S=zeros,
        draw=0.0,
    )
    return replace(nothing, **fields)


@st.composite
def any_view(draw) -> View:
    """Any view at all, of one to five engines, some without a trace."""
    engines = draw(st.integers(1, 5))
    few = st.integers(0, 10**5)

    def per_engine(values):
        return tuple(draw(st.lists(values, min_size=engines, max_size=engines)))

    traces = st.builds(
        Trace,
        engine=st.just(0),
        time=st.floats(0, 10),
        seen=few,
        running_prefill_tokens=few,
        waiting_prefill_tokens=few,
        kv_use=st.floats(0, 1),
        expert_pressure=st.floats(0, 1e6),
        running_requests=few,
        waiting_requests=few,
        kv_tokens=few,
        waiting_tokens=few,
    )
    return View(
        traces=tuple(t and replace(t, engine=e) for e, t in enumerate(per_engine(st.none() | traces))),
        compensation_S=per_engine(few),
        picks_S=per_engine(few),
        picked_tokens_S=per_engine(few),
        in_flight_S=per_engine(few),
        turn=draw(st.integers(0, engines - 1)),
        choices=draw(few),
        now=draw(st.floats(0, 12)),
        prompt_tokens=draw(st.integers(1, 10**5)),
        cached_tokens_S=per_engine(few),
        draw=draw(st.floats(0, 1, exclude_max=True)),
    )
