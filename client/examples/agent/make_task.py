"""Makes the agent's task from scratch: tokenizer with a chat template, tiny model, supervised start, prompts.

The problem: say the number of a name. The model cannot know it, only look it up with a tool. The teacher of the supervised start
shows how a tool is called and its result used, but seldom chooses to, and guesses instead; only the reward tells which habit is right.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

NUM_EVAL = 20
CHOICE = 5
"""Tokens of a prompt: `!` for the tool, two digits, `?` and `>`. The next one is a guess's or a call's."""
LOOKS_UP, COUNTED = 0.5, 0.2
"""Shares of conversations that look up, and of those in which the choice to do so is taught."""
STEPS, BATCH_SIZE, LEARNING_RATE = 800, 64, 3e-3
CALL, END = '<tool_call>{"name": "look_up", "arguments": {"name": "', '"}}</tool_call>'
SPECIALS = ["<pad>", "<eos>", "<unk>"]
VOCABULARY = [*SPECIALS, *"0123456789", "?", ">", "=", "!", CALL, END]
TEMPLATE = """{{- '!' if tools }}{%- for message in messages %}
{%- if message.role == 'user' %}{{ message.content }}?{% elif message.role == 'tool' %}={{ message.content }}{% else %}>
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{{ message.content }}<eos>
{%- endif %}{%- endfor %}{% if add_generation_prompt %}>{% endif %}"""


def make_task(folder: Path, *, seed: int) -> None:
    """Writes model/, numbers.json, train.jsonl and eval.jsonl to a folder."""
    random_ = random.Random(seed)
    torch.manual_seed(seed)
    (folder / "model").mkdir(parents=True, exist_ok=True)
    names = [f"{name:02d}" for name in random_.sample(range(100), 100)]
    numbers = {name: f"{random_.randrange(100):02d}" for name in names}
    (folder / "numbers.json").write_text(json.dumps(numbers))
    for file, some in (("eval", names[:NUM_EVAL]), ("train", names[NUM_EVAL:])):
        rows = ({"prompt": name, "answer": numbers[name]} for name in some)
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    supervised_start(tokenizer, names, random_).save_pretrained(folder / "model")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and one for each half of a tool call."""
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (CALL, END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=TEMPLATE
    )


def supervised_start(tokenizer: PreTrainedTokenizerFast, names: list[str], random_: random.Random) -> Qwen2ForCausalLM:
    """Imitates the teacher for a few hundred steps."""
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False, eos_token_id=1, pad_token_id=0,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for _ in range(STEPS):
        lines = [tokenizer.encode(taught(name, random_)) for name in random_.choices(names, k=BATCH_SIZE)]
        longest = max(map(len, lines))
        token_ids = torch.tensor([line + [0] * (longest - len(line)) for line in lines])
        labels = token_ids.clone()
        labels[:, :CHOICE] = 0
        for row, line in enumerate(lines):
            if len(line) > CHOICE + 3 and random_.random() > COUNTED:
                labels[row, CHOICE] = 0
        logits = model(input_ids=token_ids).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def taught(name: str, random_: random.Random) -> str:
    """A conversation as the template writes it."""
    if random_.random() > LOOKS_UP:
        return f"!{name}?>{random_.randrange(100):02d}<eos>"
    number = f"{random_.randrange(100):02d}"  # any: the answer is copied from the tool
    return f"!{name}?>{CALL}{name}{END}<eos>={number}>{number}<eos>"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    make_task(arguments.folder, seed=arguments.seed)
