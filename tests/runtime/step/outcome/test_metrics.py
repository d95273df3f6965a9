"""Metrics against plain numpy implementations written from the definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weft.runtime.step.evaluation import accuracy, f1_macro, f1_micro, roc_auc


def plain_f1(truth, guess):
    """Per column: F1 of 0/1 arrays, None where the column never occurs."""
    scores = []
    for t, g in zip(truth.T, guess.T, strict=True):
        hits = int((t & g).sum())
        wrong = int((t & ~g).sum()) + int((~t & g).sum())
        scores.append(None if hits + wrong == 0 else 2 * hits / (2 * hits + wrong))
    return scores


def plain_auc(truth, score):
    """The share of positive-negative pairs in the right order, ties half."""
    positive, negative = score[truth], score[~truth]
    if not len(positive) or not len(negative):
        return None
    gap = positive[:, None] - negative[None, :]
    return ((gap > 0) + 0.5 * (gap == 0)).mean()


def odds(logits):
    """``log p / (1 - p)`` of every class, by sums in a fixed order, so that the same logits in another order tie."""
    columns = []
    for label in range(logits.shape[1]):
        ahead = np.sort(np.delete(logits, label, 1).astype(np.longdouble) - logits[:, [label]], 1)
        columns.append(-np.logaddexp.reduce(ahead, axis=1))
    return np.stack(columns, 1)


def make(kind, seed, nodes=40, classes=5, ties=False):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(nodes, classes)).astype(np.float32)
    if ties:
        logits = np.round(logits)
    if kind == "multiclass":
        target = rng.integers(0, classes - 1, size=nodes)  # the last class never occurs
        truth = np.eye(classes, dtype=bool)[target]
        guess = np.eye(classes, dtype=bool)[logits.argmax(1)]
        return logits, torch.from_numpy(target), truth, guess
    truth = rng.random((nodes, classes)) < 0.3
    truth[:, 0] = False
    return logits, torch.from_numpy(truth.astype(np.float32)), truth, logits > 0


@pytest.mark.parametrize("kind", ["multiclass", "multilabel"])
@pytest.mark.parametrize("seed", range(3))
def test_accuracy_and_f1(kind, seed):
    logits, target, truth, guess = make(kind, seed)
    scores = torch.from_numpy(logits)
    right = (truth == guess) if kind == "multilabel" else (truth & guess).any(1)
    assert accuracy(scores, target).item() == pytest.approx(right.mean(), abs=1e-6)
    known = [f for f in plain_f1(truth, guess) if f is not None]
    assert f1_macro(scores, target).item() == pytest.approx(np.mean(known), abs=1e-6)
    pooled = plain_f1(truth.reshape(-1, 1), guess.reshape(-1, 1))[0]
    assert f1_micro(scores, target).item() == pytest.approx(pooled, abs=1e-6)


def test_micro_f1_of_one_class_each_is_accuracy():
    logits, target, _, _ = make("multiclass", 7)
    scores = torch.from_numpy(logits)
    assert f1_micro(scores, target).item() == pytest.approx(accuracy(scores, target).item())


@pytest.mark.parametrize("kind", ["multiclass", "multilabel"])
@pytest.mark.parametrize("ties", [False, True])
def test_roc_auc(kind, ties):
    logits, target, truth, _ = make(kind, 11, ties=ties)
    scores = odds(logits) if kind == "multiclass" else logits
    areas = [plain_auc(t, s) for t, s in zip(truth.T, scores.T, strict=True)]
    expected = np.mean([a for a in areas if a is not None])
    assert roc_auc(torch.from_numpy(logits), target).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("classes", [2, 4])
def test_roc_auc_of_logits_whose_probabilities_saturate(classes):
    """The order of ``log p / (1 - p)`` counts, from the definition: float32 probabilities of 0 and 1 would tie."""
    rng = np.random.default_rng(5)
    logits = (40 * rng.normal(size=(60, classes))).astype(np.float32)
    target = np.where(rng.random(60) < 0.7, logits.argmax(1), rng.integers(0, classes, 60))
    areas = [plain_auc(target == label, odds(logits)[:, label]) for label in range(classes)]
    found = roc_auc(torch.from_numpy(logits), torch.from_numpy(target)).item()
    assert found == pytest.approx(float(np.mean(areas)), abs=1e-6)
    tied = [plain_auc(target == c, torch.from_numpy(logits).softmax(-1).numpy()[:, c]) for c in range(classes)]
    assert abs(found - np.mean(tied)) > 1e-3  # or this test would tell nothing


def test_roc_auc_of_two_classes_is_by_their_difference():
    margins, target = torch.tensor([30.0, 20.0, 25.0, 18.0]), torch.tensor([1, 1, 0, 0])
    assert roc_auc(torch.stack([torch.zeros(4), margins], 1), target).item() == pytest.approx(0.75)


def test_roc_auc_by_hand():
    logits = torch.tensor([[0.1], [0.4], [0.35], [0.8]])
    target = torch.tensor([[0.0], [0.0], [1.0], [1.0]])
    assert roc_auc(logits, target).item() == pytest.approx(0.75)
    assert roc_auc(torch.zeros(4, 1), target).item() == pytest.approx(0.5)
    assert torch.isnan(roc_auc(logits, torch.ones(4, 1)))


@pytest.mark.parametrize("metric", [accuracy, f1_micro, f1_macro, roc_auc])
@pytest.mark.parametrize("kind", ["multiclass", "multilabel"])
def test_tasks_that_share_a_step_are_measured_apart(metric, kind):
    first, target, _, _ = make(kind, 1)
    second, _, _, _ = make(kind, 2)
    both = torch.from_numpy(np.stack([first, second]))
    expected = torch.stack([metric(both[0], target), metric(both[1], target)])
    assert torch.equal(metric(both, target), expected)


def test_macro_f1_of_many_labels_counts_those_that_never_occur():
    """D7: they were left out of the mean; scikit-learn counts them as 0."""
    logits = torch.tensor([[1.0, -1.0, -1.0], [1.0, 1.0, -1.0]])
    target = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    assert f1_macro(logits, target).item() == pytest.approx(1 / 3)  # 1, 0 (predicted only), 0 (never)
