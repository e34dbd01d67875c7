"""Actors that answer prompts, one engine each, and the crew that keeps them busy.

The crew makes every call and owns every result: an actor that dies takes only the call it was working on, which is reported as failed, and
another actor is started in its place.
"""

from __future__ import annotations

import ray

from actors.answers import cause_of, first_line
from dflash_ray.generation.answers import AnswerSettings, load_engine
from dflash_ray.generation.generate import Asked, CrewLost, Failure

_CALLS_PER_ACTOR = 2  # one at work and one waiting for it
_LOAD_SECONDS = 3600.0
_DEATHS = 3  # per actor, without an answer between them; past it they have a cause that a restart does not cure


@ray.remote
class GeneratorActor:
    def load(self, settings: AnswerSettings) -> None:
        self._engine = load_engine(settings)

    def answer(self, prompts: list[list[int]], streams: list[int]) -> list[list[int]]:
        return self._engine.answer(prompts, streams)


class ActorCrew:
    """`count` actors with `gpus` GPUs each. Made when all of them are loaded; a target that cannot be read is a ValueError, one that
    cannot be loaded `CrewLost`."""

    def __init__(self, settings: AnswerSettings, count: int, gpus: float):
        self._settings = settings
        env = {"OMP_NUM_THREADS": str(settings.threads), "TOKENIZERS_PARALLELISM": "false"}
        if not gpus:
            env["CUDA_VISIBLE_DEVICES"] = ""
        self._options = {"num_cpus": 0, "num_gpus": gpus, "max_restarts": 0, "runtime_env": {"env_vars": env}}
        self._loading: list[ray.ObjectRef] = []
        self._actors = [self._start() for _ in range(count)]
        try:
            ray.get(self._loading, timeout=_LOAD_SECONDS)
        except ray.exceptions.RayTaskError as error:
            raise cause_of(error) from None
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            raise CrewLost(f"a target was not loaded: {first_line(error)}") from None
        self._calls: dict[ray.ObjectRef, tuple[int, ray.actor.ActorHandle, list[Asked]]] = {}
        self._deaths = 0  # since the last answer

    @property
    def free(self) -> int:
        return _CALLS_PER_ACTOR * len(self._actors) - len(self._calls)

    def ask(self, group: list[Asked]) -> None:
        load = [sum(place == at for at, _, _ in self._calls.values()) for place in range(len(self._actors))]
        place = load.index(min(load))
        actor = self._actors[place]
        ref = actor.answer.remote([asked.prompt for asked in group], [asked.stream for asked in group])
        self._calls[ref] = (place, actor, group)

    def wait(self) -> tuple[list[Asked], list[list[int]] | Failure]:
        """The next call that ends. `CrewLost` if actors die again and again."""
        done: list[ray.ObjectRef] = []
        while not done:
            done, _ = ray.wait(list(self._calls), num_returns=1, timeout=10)
        place, actor, group = self._calls.pop(done[0])
        try:
            answers = ray.get(done[0], timeout=60)
            self._deaths = 0
            return group, answers
        except ray.exceptions.RayActorError as error:
            if self._actors[place] is actor:  # a call that waited for the same dead actor finds the new one here
                self._replace(place, error)
            return group, Failure(_cause_of_death(error))
        except ray.exceptions.RayTaskError as error:
            return group, Failure(first_line(cause_of(error)))
        except ray.exceptions.RayError as error:
            return group, Failure(first_line(error))

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)

    def _start(self) -> ray.actor.ActorHandle:
        actor = GeneratorActor.options(**self._options).remote()
        self._loading.append(actor.load.remote(self._settings))
        return actor

    def _replace(self, place: int, error: ray.exceptions.RayActorError) -> None:
        self._deaths += 1
        if self._deaths >= _DEATHS * len(self._actors):
            raise CrewLost(f"actors died {self._deaths} times; {_cause_of_death(error)}")
        self._actors[place] = self._start()


def _cause_of_death(error: ray.exceptions.RayActorError) -> str:
    """Ray says first that the actor died, and last what was raised if it died of that."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"an actor died: {lines[-1][:200]}" if lines else "an actor died"
