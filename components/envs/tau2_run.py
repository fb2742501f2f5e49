"""The official tau2 Orchestrator, driven from outside one agent turn at a time, without a thread.

The agent is a slot: a turn is put in, and the Orchestrator delivers it when it asks for one.
Everything else (delivery order, steps, errors, stop tokens) is the official code; the check after
each step, which older packages keep inline in ``run()``, is restated here.
"""

from __future__ import annotations

import time
import uuid
from datetime import datetime, timedelta
from typing import Any

from components.envs.base import Message, UserError
from components.envs.refusals import ToolTimeout, time_limit
from components.envs.tau2_messages import agent_may_see, from_official, to_official
from components.envs.tau2_players import make_agent, make_solo_agent, seat_user


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
        solo: bool = False,
    ) -> None:
        """Start, and go on until the agent is asked for its first turn (or the run has ended).

        Args:
            domain: tau2's name of the domain.
            environment: a fresh tau2 environment.
            task: the tau2 task.
            user: one of our user simulators, an object of tau2's own (it has
                ``generate_next_message``), or None in a solo run.
            seed: given to the user, and recorded.
            max_steps: deliveries after which the run ends.
            max_errors: tool errors after which the run ends.
            tool_timeout_s: most seconds for the tool calls of one turn.
            solo: no user; ``environment`` is in solo mode. The official run then opens with the
                agent's own turn, so that it is only started by the first :meth:`deliver`.
        """
        from tau2.orchestrator.orchestrator import Orchestrator
        from tau2.utils.utils import get_now

        self.environment = environment
        self.solo = solo
        self.agent = make_solo_agent(environment, task) if solo else make_agent(environment)
        self._tool_timeout_s = tool_timeout_s
        self.orchestrator: Any = Orchestrator(
            domain=domain,
            agent=self.agent,
            user=seat_user(user),
            environment=environment,
            task=task,
            max_steps=max_steps,
            max_errors=max_errors,
            seed=seed,
            solo_mode=solo,
        )
        self._start = datetime.now()
        # Where a package's own _finalize() is used, it reads these two.
        self.orchestrator._run_start_time = get_now()
        self.orchestrator._run_start_perf = time.perf_counter()
        self._num_stamped = 0
        self._num_seen = 0
        history = task.initial_state and task.initial_state.message_history
        self._started = not solo or bool(history)
        if self._started:
            self.orchestrator.initialize()
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
        if self._started:
            self._step()
        else:
            self._started = True
            self.orchestrator.initialize()
            self._stamp()
        self._num_seen = len(self.orchestrator.trajectory)  # the agent knows its own turn
        self._advance()

    def _advance(self) -> None:
        """Go on until the agent is asked for a turn."""
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
