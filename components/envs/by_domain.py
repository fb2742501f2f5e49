"""One environment that plays several domains: each task in the environment of its domain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import gymnasium

from components.envs.base import Env, Message, RewardChecker
from components.envs.spaces import Text


class ByDomain(gymnasium.Env):
    """Environments by domain; ``reset`` picks by the task's. See :class:`components.envs.base.Env`.

    A config names them::

        env:
          _component_: components.envs.by_domain.ByDomain
          envs:
            retail: {_component_: components.envs.tau2.Tau2Env, domain: retail, max_steps: 60}
            mock: {_component_: components.envs.tau2.Tau2Env, domain: mock, tasks: generated:7:64}

    An episode is exactly the one that its own environment would play.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    component_makers: ClassVar[Mapping[str, tuple[str, ...]]] = {"envs": ("checker",)}
    """For configs: ``envs`` holds makers, and ``checker`` is passed to them."""

    def __init__(
        self, *, envs: Mapping[str, Callable[..., Env]], checker: RewardChecker | None = None
    ) -> None:
        """Make every environment, so that what one refuses is said before anything is played.

        Args:
            envs: domain -> what makes its environment.
            checker: passed to each of them; each takes its own default where None.

        Raises:
            ValueError: for no environment, what is not a maker, an environment of another domain,
                and what an environment refuses.
        """
        if not envs:
            raise ValueError("envs: at least one domain is needed")
        self._envs: dict[str, Env] = {}
        for domain, make in envs.items():
            if not callable(make):
                raise ValueError(f"envs.{domain}: {make!r} makes no environment")
            env = make() if checker is None else make(checker=checker)
            if getattr(env, "domain", domain) != domain:
                raise ValueError(
                    f"envs.{domain}: its environment is of domain {env.domain!r}"  # type: ignore
                )
            self._envs[domain] = env
        self._current: Env | None = None
        self.observation_space = Text()
        self.action_space = Text(messages=True)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start a task.

        Args:
            seed: of the environment that plays it; without a domain, of the choice too.
            options: ``{"task_id": ..., "domain": ...}``. Without a task one is drawn, and without
                both the domain is drawn as well.

        Raises:
            ValueError: for a domain without an environment, a task without its domain, and what the
                environment refuses.
        """
        super().reset(seed=seed)
        self._current = None
        given = dict(options or {})
        if "domain" not in given:
            if "task_id" in given and len(self._envs) > 1:
                raise ValueError(
                    f"options: task {given['task_id']!r} needs its domain, one of "
                    f"{', '.join(self._envs)}"
                )
            given["domain"] = list(self._envs)[int(self.np_random.integers(len(self._envs)))]
        if given["domain"] not in self._envs:
            raise ValueError(
                f"domain: {given['domain']!r} has no environment (there are: "
                f"{', '.join(self._envs)})"
            )
        env = self._envs[given["domain"]]
        own_seed = int(self.np_random.integers(2**31)) if seed is None else seed
        observation, info = env.reset(seed=own_seed, options=given)
        self._current = env
        return observation, info

    def step(self, action: str | Message) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Deliver an agent turn to the environment of the running episode.

        Raises:
            gymnasium.error.ResetNeeded: without a running episode.
        """
        if self._current is None:
            raise gymnasium.error.ResetNeeded("step needs a running episode: call reset first")
        return self._current.step(action)

    def close(self) -> None:
        """Close every environment."""
        self._current = None
        for env in self._envs.values():
            env.close()
