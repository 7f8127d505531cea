"""Count what one training iteration runs through: files of flowrl, and frames above the network.

python scripts/count_path.py quickstart-grpo rollout.prompts_per_iteration=2
"""

import sys
from types import FrameType
from typing import Any

from flowrl.api import training_runtime
from flowrl.assembly.learner import ProvidedObjects, build_learner
from flowrl.config import load_config


def count(recipe: str, changes: list[str]) -> tuple[set[str], list[str]]:
    """Return the files of flowrl that an iteration enters, and the longest stack at the network."""
    config = load_config(recipe, [*changes, "evaluation.prompts=null"])
    learner = build_learner(config, training_runtime(config), ProvidedObjects())
    learner.iterate(0)  # what is imported or compiled once does not count
    files: set[str] = set()
    deepest: list[str] = []
    network = type(learner.policy.network).forward.__code__

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        name = frame.f_code.co_filename
        if "/flowrl/" in name:
            files.add(name.rpartition("/flowrl/")[2])
        if frame.f_code is network:
            stack, above = [], frame.f_back
            while above is not None:
                path, _, rest = above.f_code.co_filename.rpartition("/flowrl/")
                if path:
                    stack.append(f"{rest}:{above.f_code.co_qualname}")
                above = above.f_back
            deepest[:] = max(deepest, stack, key=len)

    sys.setprofile(watch)
    try:
        learner.iterate(1)
    finally:
        sys.setprofile(None)
    return files, deepest


def main() -> None:
    files, stack = count(sys.argv[1], sys.argv[2:])
    print(*sorted(files), sep="\n")
    print(*reversed(stack), sep="\n")
    print(f"{len(files)} files of flowrl, {len(stack)} frames above the network")


if __name__ == "__main__":
    main()
