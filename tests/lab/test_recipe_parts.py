"""The models, readers and metrics that recipes are made of, against loops, references and numbers by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from data_folders import small
from torch import nn

import thinwire
from thinwire.lab.recipes import RECIPES, Digits
from thinwire.lab.recipes.an4 import edit_distance, greedy_text
from thinwire.lab.recipes.data import words
from thinwire.lab.recipes.data.subwords import UNKNOWN, Subwords, learn, units
from thinwire.lab.recipes.digits import shifted
from thinwire.lab.recipes.histograms import GradientTap, histograms
from thinwire.lab.recipes.images import cropped
from thinwire.lab.recipes.models.bigru import BiGru
from thinwire.lab.recipes.models.lstm_lm import LstmLanguageModel
from thinwire.lab.recipes.models.resnet_cifar import resnet
from thinwire.lab.recipes.models.transformer_lm import TransformerLanguageModel
from thinwire.lab.recipes.models.vgg_cifar import vgg16
from thinwire.lab.recipes.translation import bleu, bleu_counts
from thinwire.transport import ThreadNet, ThreadWorld

pytestmark = pytest.mark.usefixtures("one_thread")


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_models_have_the_papers_sizes() -> None:
    with torch.device("meta"):
        assert parameters(resnet(20)) == 269_722
        assert parameters(resnet(110)) == 1_727_962
        assert parameters(vgg16()) == 14_724_042
        large = parameters(LstmLanguageModel(10_000, 1500, 2, 0.65, 0.04))
        assert parameters(LstmLanguageModel(10_000, 650, 2, 0.5, 0.05)) == 13_280_400
    assert round(large * 4 / 2**20, 2) == 194.68  # MiB: the gradient size in DGC's Table 2


def test_language_model_is_causal() -> None:
    torch.manual_seed(0)
    model = TransformerLanguageModel(11, width=16, num_layers=2, num_heads=2, max_length=9, dropout=0.1).eval()
    tokens = torch.randint(0, 11, (2, 9))
    other = tokens.clone()
    other[:, 6:] = (other[:, 6:] + 1) % 11
    torch.testing.assert_close(model(tokens)[0][:, :6], model(other)[0][:, :6])
    assert not torch.allclose(model(tokens)[0][:, 6:], model(other)[0][:, 6:])


def test_padding_does_not_reach_a_bidirectional_gru() -> None:
    torch.manual_seed(0)
    layer = BiGru(3, 4)
    x = torch.randn(2, 7, 3)
    alone = layer(x[:1, :5], torch.tensor([5]))
    padded = layer(x, torch.tensor([5, 7]))
    torch.testing.assert_close(padded[:1, :5], alone)
    reference = nn.GRU(3, 4, batch_first=True, bidirectional=True)
    for suffix, one in (("", layer.forwards), ("_reverse", layer.backwards)):
        for key, value in one.named_parameters():
            getattr(reference, key + suffix).data.copy_(value)
    torch.testing.assert_close(padded[1:], reference(x[1:])[0])


@pytest.mark.parametrize("name", ["multi30k-gru", "multi30k-transformer"])
def test_translators_decode_step_by_step_what_they_say_at_once(name: str, folder: Path) -> None:
    recipe: Any = small(name, folder)
    torch.manual_seed(0)
    model: Any = recipe.model().eval()
    source, target, following, _ = next(recipe.train_batches(1, seed=0, rank=0, world=1))
    assert (target[:, 1:] == following[:, :-1]).all()
    memory, state = model.encode(source), None
    steps = []
    for end in range(1, target.shape[1] + 1):
        logits, state = model.next_logits(target[:, :end], memory, state)
        steps.append(logits)
    torch.testing.assert_close(torch.stack(steps, dim=1), model(source, target), rtol=1e-3, atol=1e-4)
    wider = torch.nn.functional.pad(source, (0, 3))
    torch.testing.assert_close(model(wider, target), model(source, target), rtol=1e-3, atol=1e-4)


def test_crops_and_flips_are_what_a_loop_would_do() -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8)
    corners, flips = torch.randint(0, 5, (2, 6)), torch.tensor([True, False] * 3)
    found = cropped(images, corners, flips, padding=2)
    for number in range(6):
        padded = torch.nn.functional.pad(images[number], (2, 2, 2, 2))
        row, column = (int(value) for value in corners[:, number])
        expected = padded[:, row : row + 8, column : column + 8]
        assert torch.equal(found[number], expected.flip(2) if flips[number] else expected)
    assert found.is_contiguous()


def test_recurrent_model_goes_on_where_it_was(folder: Path) -> None:
    """Two windows, one after the other, are one window of twice the length; and a checkpoint between them holds."""
    recipe: Any = small("ptb-lstm", folder)
    torch.manual_seed(0)
    model = recipe.model().eval()
    batches = recipe.train_batches(1, seed=0, rank=0, world=1)
    (x1, y1), (x2, y2) = next(batches), next(batches)
    losses = [recipe.loss(model, batch).item() for batch in ((x1, y1), (x2, y2))]
    recipe.state = None
    both = recipe.loss(model, (torch.cat([x1, x2], 1), torch.cat([y1, y2], 1))).item()
    assert both == pytest.approx(sum(losses) / 2, rel=1e-5)

    other: Any = small("ptb-lstm", folder)
    recipe.state = None
    recipe.loss(model, (x1, y1))
    batches = other.train_batches(1, seed=0, rank=0, world=1)
    next(batches)  # done before the checkpoint
    other.load_state_dict(recipe.state_dict())
    assert other.loss(model, next(batches)).item() == pytest.approx(losses[1], rel=1e-6)


def test_perplexity_of_a_model_that_knows_nothing(folder: Path) -> None:
    for name in ("ptb-lstm", "shakespeare"):
        recipe: Any = RECIPES[name](folder)
        model = recipe.model().eval()
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        with torch.no_grad():
            totals = [recipe.score(model, batch) for batch in recipe.test_batches(rank=0, world=1)]
        nats, count = (sum(values) for values in zip(*totals, strict=True))
        assert count == len(recipe.test_stream) - 1
        size = recipe.num_words if name == "ptb-lstm" else recipe.num_characters
        expected = size if name == "ptb-lstm" else math.log2(size)
        assert recipe.judge(nats, count) == pytest.approx(expected, rel=1e-4)


def test_words_of_a_text_are_numbered_as_they_come(tmp_path: Path) -> None:
    (tmp_path / "ptb").mkdir()
    (tmp_path / "ptb" / "a").write_text(" the dog \n the <unk> \n")
    (tmp_path / "ptb" / "b").write_text("a dog\n")
    train, test, vocabulary = words.read(words.PTB, tmp_path, "a", "b")
    assert vocabulary == ["<unk>", "<eos>", "the", "dog"]
    assert train.tolist() == [2, 3, 1, 2, 0, 1] and test.tolist() == [0, 3, 1]


def test_byte_pairs_are_merged_by_frequency() -> None:
    assert learn({"abab": 3, "abc": 2, "bc": 4}, 3) == [("a", "b"), ("b", "c"), ("ab", "ab")]
    assert units("Two  dogs, big ones.") == [" Two", " dogs", ",", " big", " ones", "."]
    sentences = ["Ein Hund läuft, der andere sitzt.", "Ein Hund sitzt."] * 3
    subwords = Subwords(sentences, 60)
    assert len(subwords) <= 60
    for sentence in sentences:
        assert subwords.decode(subwords.encode(sentence)) == sentence
    assert len(subwords.encode("Ein Hund")) == 2
    assert subwords.encode("Ein ☃")[-1] == UNKNOWN and subwords.decode(subwords.encode("Ein ☃")) == "Ein"


def test_bleu_by_hand() -> None:
    """ "the cat sat on a mat" for "the cat sat on the mat": 5 of 6, 3 of 5, 2 of 4, 1 of 3 n-grams are right."""
    counts = bleu_counts(["the cat sat on a mat"], ["the cat sat on the mat"])
    assert counts == (5, 3, 2, 1, 6, 5, 4, 3, 6, 6)
    assert bleu(counts) == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)
    # Three words too short: exp(1 - 6 / 4) for the brevity; counts of two sentences add up.
    short = bleu_counts(["the cat sat on"], ["the cat sat on the mat"])
    assert bleu(short) == pytest.approx(100 * math.exp(1 - 6 / 4))
    both = bleu_counts(["the cat sat on a mat", "the cat sat on"], ["the cat sat on the mat"] * 2)
    assert both == tuple(a + b for a, b in zip(counts, short, strict=True))


def test_error_rate_by_hand() -> None:
    assert edit_distance(list("ABC"), list("ABC")) == 0
    assert edit_distance(list("AXCD"), list("ABC")) == 2  # one word wrong, one too many
    assert edit_distance([], list("ABC")) == 3 and edit_distance(list("AB"), []) == 2
    assert edit_distance("kitten", "sitting") == 3
    space, apostrophe, a, b = 1, 2, 3, 4
    assert greedy_text([0, a, a, 0, a, b, b, 0, space, 0, apostrophe]) == "AAB '"


def test_digits_are_all_there_and_split_for_good() -> None:
    recipe = Digits()
    assert (len(recipe.y_train), len(recipe.y_test)) == (1197, 600)
    assert sorted(torch.cat([recipe.y_train, recipe.y_test]).bincount().tolist()) == sorted(
        [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    )
    train = {image.numpy().tobytes() for image in recipe.x_train}
    assert not any(image.numpy().tobytes() in train for image in recipe.x_test)


def test_shifts_move_whole_pixels() -> None:
    x = torch.rand(3, 1, 8, 8)
    moved = shifted(x, torch.tensor([[0, 0], [1, 0], [0, -1]]))
    assert torch.equal(moved[0], x[0])
    assert torch.equal(moved[1, 0, :-1], x[1, 0, 1:]) and not moved[1, 0, -1].any()
    assert torch.equal(moved[2, 0, :, 1:], x[2, 0, :, :-1]) and not moved[2, 0, :, 0].any()


def test_learning_rate_factors_are_for_methods_that_estimate_no_mean() -> None:
    for recipe in RECIPES.values():
        for method in (kind() for kind in thinwire.METHODS.values()):
            factor = 1.0 if method.estimates_mean else recipe.sign_lr_factor
            assert recipe.lr_factor(recipe, method) == factor, (recipe.name, method)  # type: ignore[arg-type]


def test_histograms_of_a_model_without_ternary_tensors() -> None:
    def work(net: ThreadNet) -> set[str]:
        module = nn.Linear(8, 4)
        reducer = thinwire.Reducer(module.named_parameters(), thinwire.TernGrad(), net)
        tap = GradientTap(module)
        module(torch.ones(2, 8)).sum().backward()
        found = histograms("terngrad", reducer, module, tap, 0)
        return set(found.by_tag) if found is not None else set()

    assert ThreadWorld(2).run(work) == [{"weight/original", "weight/averaged"}, set()]
