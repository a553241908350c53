"""Train the embedded model from scratch on synthetic arithmetic.

    python -m common.models.pretrain --output DIR

Writes a Hugging Face folder: `config.json`, `model.safetensors` and the
tokenizer with its chat template. Only problems of the training split are used,
and the examples are careless (`careless_answer`): the model knows the task and
does it badly, which is what a federation is there to mend.

About five minutes on two CPU cores. The result depends on the processor's
arithmetic in its last bits, so it is shipped, not rebuilt at install time.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from common.tasks import math as task

PAD, END, SYSTEM, USER, ASSISTANT, TOOL = SPECIAL_TOKENS = (
    "<|pad|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] or '') + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
VOCABULARY = 320
CONTEXT_TOKENS = 512
BARE_SHARE = 0.30
DROPPED_CARRY_SHARE = 0.38
RANDOM_SLIP_SHARE = 0.15


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every digit is a token of its own; encodes any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    stream = task.problems(task.Distribution(), task.Split.TRAIN, seed=0)
    corpus = [line for _ in range(500) for p in [next(stream)] for line in (p.prompt, p.solution)]
    tokenizer.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT, TOOL],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_TOKENS,
    )


def careless_answer(problem: task.Problem, rng: random.Random) -> str:
    """An answer as a careless writer gives it.

    Three in ten come without steps, half of those wrong. With steps, a problem
    that carries goes wrong the way children do it, by dropping the carry, more
    often than not; so the model is wrong there even when it decodes greedily.
    """

    def slip(value: int) -> int:
        return value + rng.choice((-10, -1, 1, 10))

    style = rng.random()
    if style < BARE_SHARE:
        value = problem.answer if rng.random() < 0.5 else slip(problem.answer)
        return str(value) if style < BARE_SHARE / 2 else f"Answer: {value}"
    if problem.carries and style < BARE_SHARE + DROPPED_CARRY_SHARE:
        return dropped_carry(problem)
    if not problem.carries and style < BARE_SHARE + RANDOM_SLIP_SHARE:
        first, second = problem.steps
        wrong = slip(int(second.split("=")[1]))
        return f"{first} ; {second.split('=')[0]}={wrong}\nAnswer: {slip(problem.answer)}"
    return problem.solution


def dropped_carry(problem: task.Problem) -> str:
    """The classic mistakes: 38+45=73, and 52-38=26 (the smaller digit from the larger)."""
    first, second = problem.steps
    if problem.operator == "+":
        return f"{first} ; {second}\nAnswer: {problem.answer - 10}"
    without_tens = int(first.split("=")[1])
    wrong = without_tens // 10 * 10 + abs(without_tens % 10 - problem.right % 10)
    return f"{first} ; {second.split('=')[0]}={wrong}\nAnswer: {wrong}"


def batches(tokenizer: PreTrainedTokenizerFast, size: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (token ids, labels), both [size, T]; labels are -100 outside the answer."""
    rng = random.Random(seed)
    stream = task.problems(task.Distribution(), task.Split.TRAIN, seed)
    while True:
        drawn = [next(stream) for _ in range(size)]
        prompts = tokenizer([f"{USER}{p.prompt}{END}{ASSISTANT}" for p in drawn])["input_ids"]
        answers = tokenizer([f"{careless_answer(p, rng)}{END}" for p in drawn])["input_ids"]
        longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
        ids_BT = torch.full((size, longest), tokenizer.pad_token_id)
        labels_BT = torch.full((size, longest), -100)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            ids_BT[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            labels_BT[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        yield ids_BT, labels_BT


def pretrain(output: Path, *, steps: int, batch_size: int, seed: int) -> None:
    """Train and save; prints the loss every hundred steps."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=320,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT_TOKENS,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {len(tokenizer)}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    for step, (ids_BT, labels_BT) in enumerate(islice(batches(tokenizer, batch_size, seed), steps), start=1):
        logits_BTV = model(input_ids=ids_BT).logits
        loss = torch.nn.functional.cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=-100
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    pretrain(arguments.output, steps=arguments.steps, batch_size=arguments.batch_size, seed=arguments.seed)


if __name__ == "__main__":
    main()
