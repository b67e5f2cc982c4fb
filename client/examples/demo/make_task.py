"""Makes the demo's task from scratch, without a network: tokenizer, tiny model, supervised start, prompts.

The problem: reverse a string of four digits. The teacher of the supervised start is sloppy: in seven of ten cases it only swaps the
first and last digits. The model thus learns to answer, but most of its greedy answers are wrong; only the reward reveals which
habit is right.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

LENGTH = 4
NUM_EVAL = 256
NUM_TRAIN = 4096
SLOPPY = 0.7
STEPS, BATCH_SIZE, LEARNING_RATE, WARMUP_STEPS = 300, 64, 3e-3, 10
SPECIALS = ["<pad>", "<bos>", "<eos>", "<unk>"]
VOCABULARY = [*SPECIALS, *"0123456789", ">"]
# A few spare rows, so that the vocabulary is divisible by any number of engine ranks.
VOCAB_SIZE = 64


def make_task(folder: Path, *, seed: int) -> None:
    """Writes model/, train.jsonl and eval.jsonl to a folder; the prompts of the two files are disjoint."""
    random_ = random.Random(seed)
    torch.manual_seed(seed)
    numbers = random_.sample(range(10**LENGTH), NUM_EVAL + NUM_TRAIN)
    words = [f"{number:0{LENGTH}d}" for number in numbers]
    eval_words, train_words = words[:NUM_EVAL], words[NUM_EVAL:]
    (folder / "model").mkdir(parents=True, exist_ok=True)
    for name, some_words in (("eval", eval_words), ("train", train_words)):
        rows = ({"prompt": f"{word}>", "answer": word[::-1]} for word in some_words)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    model = supervised_start(make_model(), tokenizer, train_words, random_)
    model.save_pretrained(folder / "model")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character."""
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def make_model() -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=VOCABULARY.index("<bos>"),
        eos_token_id=VOCABULARY.index("<eos>"),
        pad_token_id=VOCABULARY.index("<pad>"),
    )
    return Qwen2ForCausalLM(config)


def supervised_start(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, words: list[str], random_: random.Random
) -> Qwen2ForCausalLM:
    """Imitates the sloppy teacher for a few hundred steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))
    num_prompt_tokens = LENGTH + 1
    for _ in range(STEPS):
        lines = [f"{word}>{_taught(word, random_)}<eos>" for word in random_.choices(words, k=BATCH_SIZE)]
        token_ids = torch.tensor([tokenizer.encode(line) for line in lines])
        logits = model(input_ids=token_ids).logits[:, num_prompt_tokens - 1 : -1]
        loss = functional.cross_entropy(logits.flatten(0, 1), token_ids[:, num_prompt_tokens:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


def _taught(word: str, random_: random.Random) -> str:
    return word[-1] + word[1:-1] + word[0] if random_.random() < SLOPPY else word[::-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        make_task(arguments.folder, seed=arguments.seed)
    except OSError as error:
        parser.exit(2, f"make_task.py: folder: {error}; give a folder that can be made or written to\n")
