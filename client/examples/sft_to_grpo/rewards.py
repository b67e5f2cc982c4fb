"""Reward: whether the completion is the row's answer."""


def exact(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)
