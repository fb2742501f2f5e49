"""The official tau2 Orchestrator, driven from outside one agent turn at a time, without a thread.

The agent is a slot: a turn is put in, and the Orchestrator delivers it when it asks for one.
Everything else (delivery order, steps, errors, stop tokens) is the official code; the check after
each step, which older packages keep inline in ``run()``, is restated here.
"""

from __future__ import annotations

import functools
import time
import uuid
from datetime import datetime, timedelta
from typing import Any

from components.envs.base import Message, UserError
from components.envs.refusals import ToolTimeout, time_limit
from components.envs.tau2_messages import agent_may_see, from_official, to_official


@functools.cache
def _bases() -> tuple[type, type]:
    """tau2's agent and user base classes, under the names of either package."""
    from tau2.user.user_simulator import UserSimulator

    try:
        from tau2.agent.base_agent import HalfDuplexAgent as AgentBase  # type: ignore
    except ImportError:
        from tau2.agent.base import LocalAgent as AgentBase
    return AgentBase, UserSimulator


@functools.cache
def _slot_agent() -> type:
    class SlotAgent(_bases()[0]):  # type: ignore[misc]
        """Says what was put into its slot; never stops a run by itself."""

        turn: Any = None

        def get_init_state(self, message_history: Any = None) -> list:
            return list(message_history or [])

        def generate_next_message(self, message: Any, state: list) -> tuple[Any, list]:
            assert self.turn is not None, "the Orchestrator asked for a turn that is not there"
            turn, self.turn = self.turn, None
            return turn, state

        def set_seed(self, seed: int) -> None:
            pass

    return SlotAgent


@functools.cache
def _text_user() -> type:
    class TextUser(_bases()[1]):  # type: ignore[misc]
        """Lets one of our user simulators (agent text in, user text out) sit in tau2's place."""

        def __init__(self, simulator: Any) -> None:
            super().__init__(llm=None)
            self.simulator = simulator

        def get_init_state(self, message_history: Any = None) -> list:
            return list(message_history or [])

        def generate_next_message(self, message: Any, state: list) -> tuple[Any, list]:
            from tau2.data_model.message import UserMessage

            text = self.simulator.reply(message.content)
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"expected text from the user, got {text!r}")
            return UserMessage(role="user", content=text, cost=0.0), state

        def set_seed(self, seed: int) -> None:
            if hasattr(self.simulator, "set_seed"):
                self.simulator.set_seed(seed)

    return TextUser


class OfficialRun:
    """One run of a task: started at construction, then advanced by :meth:`deliver`."""

    def __init__(
        self,
        *,
        domain: str,
        environment: Any,
        task: Any,
        user: Any,
        seed: int,
        max_steps: int,
        max_errors: int,
        tool_timeout_s: float,
    ) -> None:
        """Start, and go on until the agent is asked for its first turn (or the run has ended).

        Args:
            domain: tau2's name of the domain.
            environment: a fresh tau2 environment.
            task: the tau2 task.
            user: one of our user simulators, or an object of tau2's own (it has
                ``generate_next_message``).
            seed: given to the user, and recorded.
            max_steps: deliveries after which the run ends.
            max_errors: tool errors after which the run ends.
            tool_timeout_s: most seconds for the tool calls of one turn.
        """
        from tau2.orchestrator.orchestrator import Orchestrator
        from tau2.utils.utils import get_now

        self.environment = environment
        # Nobody reads the agent's tools here, and building them takes 10 ms.
        self.agent = _slot_agent()(tools=[], domain_policy=environment.policy)
        self._tool_timeout_s = tool_timeout_s
        self.orchestrator: Any = Orchestrator(
            domain=domain,
            agent=self.agent,
            user=user if hasattr(user, "generate_next_message") else _text_user()(user),
            environment=environment,
            task=task,
            max_steps=max_steps,
            max_errors=max_errors,
            seed=seed,
        )
        self._start = datetime.now()
        # Where a package's own _finalize() is used, it reads these two.
        self.orchestrator._run_start_time = get_now()
        self.orchestrator._run_start_perf = time.perf_counter()
        self.orchestrator.initialize()
        self._num_stamped = 0
        self._num_seen = 0
        self._stamp()
        self._advance()

    @property
    def done(self) -> bool:
        return self.orchestrator.done

    @property
    def num_steps(self) -> int:
        return self.orchestrator.step_count

    @property
    def num_errors(self) -> int:
        return self.orchestrator.num_errors

    @property
    def termination_reason(self) -> str:
        reason = self.orchestrator.termination_reason
        return "" if reason is None else reason.value

    def deliver(self, message: Message) -> None:
        """Deliver the agent's turn and go on until it is asked again, or the run has ended.

        Raises:
            UserError: if the user simulator failed.
            TimeoutError: if a tool ran past its limit.
        """
        assert not self.done, "the run has ended"
        self.agent.turn = to_official(message)
        self._step()
        self._num_seen = len(self.orchestrator.trajectory)  # the agent knows its own turn
        self._advance()

    def _advance(self) -> None:
        while not self.done and self.orchestrator.to_role.value != "agent":
            self._step()

    def _step(self) -> None:
        run = self.orchestrator
        receiver = run.to_role.value
        if receiver == "user":
            try:
                run.step()
            except Exception as error:
                raise UserError(f"the user simulator failed: {error}") from error
        elif receiver == "env":
            names = [call.name for call in run.message.tool_calls]
            try:
                with time_limit(self._tool_timeout_s):
                    run.step()
            except ToolTimeout:
                raise TimeoutError(
                    f"tools {names} ran past tool_timeout_s={self._tool_timeout_s}"
                ) from None
        else:
            run.step()
        self._stamp()
        self._check_termination()

    def _check_termination(self) -> None:
        run = self.orchestrator
        if hasattr(run, "_check_termination"):
            run._check_termination()
            return
        from tau2.data_model.simulation import TerminationReason

        if run.to_role.value == "env":
            return
        # The later check overwrites the earlier reason, and a stop by the user, as in run().
        if run.step_count >= run.max_steps:
            run.done = True
            run.termination_reason = TerminationReason.MAX_STEPS
        if run.num_errors >= run.max_errors:
            run.done = True
            run.termination_reason = TerminationReason.TOO_MANY_ERRORS

    def _stamp(self) -> None:
        """Give new messages increasing times: the official record is sorted by them.

        Set from the position, so that a message built early or a clock set back changes nothing.
        """
        trajectory = self.orchestrator.trajectory
        for index in range(self._num_stamped, len(trajectory)):
            moment = self._start + timedelta(milliseconds=index)
            trajectory[index].timestamp = moment.isoformat(timespec="microseconds")
        self._num_stamped = len(trajectory)

    def new_messages(self) -> tuple[Message, ...]:
        """What the agent has not seen yet of what it may see."""
        messages = self._visible(self.orchestrator.trajectory[self._num_seen :])
        self._num_seen = len(self.orchestrator.trajectory)
        return messages

    def all_messages(self) -> tuple[Message, ...]:
        """Everything the agent may see, its own turns included."""
        return self._visible(self.orchestrator.trajectory)

    @staticmethod
    def _visible(messages: list[Any]) -> tuple[Message, ...]:
        return tuple(from_official(m) for m in messages if agent_may_see(m))

    def record(self) -> Any:
        """The official ``SimulationRun`` of a run that has ended."""
        assert self.done, "the run goes on"
        run = self.orchestrator
        if hasattr(run, "_finalize"):
            return run._finalize()
        from tau2.data_model.simulation import SimulationRun
        from tau2.utils.llm_utils import get_cost
        from tau2.utils.utils import format_time

        run.user.stop(run.message if run.to_role.value == "user" else None, run.user_state)
        messages = run.get_trajectory()
        costs = get_cost(messages)
        agent_cost, user_cost = (None, None) if costs is None else costs
        now = datetime.now()
        return SimulationRun(
            id=str(uuid.uuid4()),
            task_id=run.task.id,
            start_time=format_time(self._start),
            end_time=format_time(now),
            duration=(now - self._start).total_seconds(),
            termination_reason=run.termination_reason.value,
            reward_info=None,
            user_cost=user_cost,
            agent_cost=agent_cost,
            messages=messages,
            seed=run.seed,
        )
