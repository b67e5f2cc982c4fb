"""An agent with a tool: it may look a name's number up before it answers."""

from tasuki.client.policy import Policy


def look_up(name: str) -> str:
    """The number of a name.

    name: two digits
    """
    return str(int(name) * 37 % 100).zfill(2)


async def solve(policy: Policy, prompt: str, answer: str) -> float:
    """Asks for the number of a name; the reward is 1 if the last answer is right."""
    chat = policy.chat(tools=[look_up])
    reply = await chat.say(prompt)  # runs the tool and goes on, until the policy answers without it
    return float(reply.text == answer)
