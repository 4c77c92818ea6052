"""Real data that ships inside packages, so that nothing is downloaded."""

from collections.abc import Callable
from dataclasses import dataclass
from pydoc_data.topics import topics as pydoc_topics

import torch
from torch import Tensor

# A batch function: step -> (inputs, targets). The batch depends only on the step, so every level
# sees the same data in the same order, and a resumed run continues where it stopped.
BatchFn = Callable[[int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Digits:
    """Handwritten digits of scikit-learn, split once: images [N, 1, 8, 8] in 0..1, labels [N]."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def batch(self, step: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Images [batch_size, 1, 8, 8] and labels [batch_size], drawn with replacement."""
        index = torch.randint(len(self.train_labels), (batch_size,), generator=_generator(step))
        return self.train_images[index], self.train_labels[index]


def load_digits(test_fraction: float = 1 / 3) -> Digits:
    """Read the 1797 images out of scikit-learn's own package; the split is seeded."""
    from sklearn.datasets import load_digits as sklearn_digits

    bunch = sklearn_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1) / 16  # the pixels are 0..16
    labels = torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(labels), generator=_generator(0))
    test, train = order.tensor_split([round(test_fraction * len(labels))])
    return Digits(images[train], labels[train], images[test], labels[test])


@dataclass(frozen=True)
class Topics:
    """Python's own reference text as character ids, int64 [N]; the last tenth is held out."""

    vocabulary: str
    train_ids: Tensor
    test_ids: Tensor

    def batch(self, step: int, batch_size: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both [batch_size, length]; the targets are one character ahead."""
        last = len(self.train_ids) - length
        start = torch.randint(last, (batch_size, 1), generator=_generator(step))
        index = start + torch.arange(length)
        return self.train_ids[index], self.train_ids[index + 1]

    def test_windows(self, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both [count, length], spread evenly over the held-out text."""
        last = len(self.test_ids) - length - 1
        start = torch.linspace(0, last, count).long().unsqueeze(1)
        index = start + torch.arange(length)
        return self.test_ids[index], self.test_ids[index + 1]


def load_topics(test_fraction: float = 0.1) -> Topics:
    """Read the text of ``help("topics")``: about 460,000 characters, 100 different ones."""
    text = "\n\n".join(pydoc_topics[name] for name in sorted(pydoc_topics))
    vocabulary = "".join(sorted(set(text)))
    id_of = {character: index for index, character in enumerate(vocabulary)}
    ids = torch.tensor([id_of[character] for character in text])
    train, test = ids.tensor_split([round((1 - test_fraction) * len(ids))])
    return Topics(vocabulary, train, test)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
