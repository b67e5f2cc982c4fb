"""Reward of the demo: 1 for exactly the correct answer, else 0."""


def exact(*, prompt: str, completion: str, answer: str) -> float:
    return float(completion == answer)
