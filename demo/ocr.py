"""Text recognition: what stands before, between and behind the three models, with numpy and Pillow only.

Detection is "differentiable binarisation" (Liao et al., AAAI 2020): a map of text probability, cut at a
threshold, boxes around its components, grown again since the map shows shrunken lines. Recognition ends in
CTC (Graves et al., ICML 2006). Pictures are RGB; the models were trained on BGR arrays [n, 3, h, w] scaled
to -1..1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from demo.geometry import Points, components, mean_inside, offset, outline, smallest_rectangle, upright

Array = NDArray[np.float32]
Model = Callable[[Array], Array]

LONGEST_SIDE = 1024  # pictures are scaled down to this for detection
THRESHOLD = 0.3  # a pixel of the map is text above this
BOX_THRESHOLD = 0.5  # a box stays if the mean of the map inside reaches this
GROWTH = 1.7  # ratio of the outward move, see `geometry.offset`
SMALLEST_SIDE = 3  # boxes with a shorter side are noise, in pixels
LINE_HEIGHT = 48  # the height that both small models want
CLASSIFIER_WIDTH = 192
RECOGNISER_WIDTH = 320  # at least; longer lines widen their batch
BATCH = 6
TURN_THRESHOLD = 0.9  # a line is turned only if the classifier is this sure
SCORE_THRESHOLD = 0.5  # a line is kept if its characters' mean probability reaches this


@dataclass(frozen=True)
class Models:
    """The three models: float32 [n, 3, h, w] to map [n, 1, h, w], to [n, 2], to [n, steps, characters]."""

    detect: Model
    classify: Model
    recognise: Model


@dataclass(frozen=True)
class Line:
    """One recognised line: its text, mean probability, and box [4, 2] in the picture's pixels."""

    text: str
    score: float
    corners: Points


def characters(model: Path) -> tuple[str, ...]:
    """What each output of the recogniser stands for: blank, the file's own list, and the space.

    The list is the metadata entry `character` of the ONNX file. Raises `ValueError` if the file has none.
    """
    for entry in onnx.load(model, load_external_data=False).metadata_props:
        if entry.key == "character":
            return ("", *entry.value.split("\n"), " ")
    raise ValueError(f"{model.name} has no metadata entry 'character'")


def to_array(picture: Image.Image) -> Array:
    """An RGB picture as float32 [3, h, w], BGR, -1..1."""
    values = np.asarray(picture.convert("RGB"), dtype=np.float32)[:, :, ::-1]
    return np.ascontiguousarray((values / 255.0 - 0.5) / 0.5).transpose(2, 0, 1)


def detection_input(picture: Image.Image) -> Array:
    """The picture for detection: [1, 3, h, w], both multiples of 32, the longer at most `LONGEST_SIDE`."""
    scale = min(1.0, LONGEST_SIDE / max(picture.size))
    w, h = (max(32, round(side * scale / 32) * 32) for side in picture.size)
    return np.ascontiguousarray(to_array(picture.resize((w, h), Image.Resampling.BILINEAR))[None])


def boxes(probability: Array, size: tuple[int, int]) -> tuple[Points, ...]:
    """Text boxes [4, 2] of a map [h, w], in pixels of a picture of `size` (w, h), in reading order."""
    h, w = probability.shape
    scale = np.array([size[0] / w, size[1] / h])
    found: list[Points] = []
    for runs in components(probability > THRESHOLD):
        core = smallest_rectangle(outline(runs))
        if (
            min(core.width, core.height) < SMALLEST_SIDE
            or mean_inside(probability, core.corners()) < BOX_THRESHOLD
        ):
            continue
        corners = upright(offset(core, GROWTH).corners()) * scale
        found.append(np.clip(corners, 0, np.array(size) - 1.0))
    return reading_order(found)


def reading_order(found: Sequence[Points]) -> tuple[Points, ...]:
    """Boxes from top to bottom, and left to right where tops differ by less than half a line's height."""
    rows: list[list[Points]] = []
    for box in sorted(found, key=lambda b: float(b[0, 1])):
        height = float(np.linalg.norm(box[3] - box[0]))
        if rows and box[0, 1] - rows[-1][0][0, 1] < height / 2:
            rows[-1].append(box)
        else:
            rows.append([box])
    return tuple(box for row in rows for box in sorted(row, key=lambda b: float(b[0, 0])))


def cut_out(picture: Image.Image, corners: Points) -> Image.Image:
    """The part of the picture inside a box, turned to lie flat (by 90 degrees more if it is tall)."""
    a, b, _, d = corners
    w = max(1, round(float(np.linalg.norm(b - a))))
    h = max(1, round(float(np.linalg.norm(d - a))))
    right, down = (b - a) / w, (d - a) / h
    matrix = (right[0], down[0], a[0], right[1], down[1], a[1])
    flat = picture.transform(
        (w, h), Image.Transform.AFFINE, tuple(map(float, matrix)), Image.Resampling.BICUBIC
    )
    return flat.transpose(Image.Transpose.ROTATE_90) if h >= 1.5 * w else flat


def line_input(parts: Sequence[Image.Image], width: int) -> Array:
    """A batch [n, 3, 48, width]: each part scaled to the height, at most `width` wide, zeros to its right."""
    batch = np.zeros((len(parts), 3, LINE_HEIGHT, width), dtype=np.float32)
    for row, part in zip(batch, parts, strict=True):
        w = min(width, max(1, math.ceil(LINE_HEIGHT * part.width / part.height)))
        row[:, :, :w] = to_array(part.resize((w, LINE_HEIGHT), Image.Resampling.BILINEAR))
    return batch


def recognition_width(parts: Sequence[Image.Image]) -> int:
    """The width of a batch: enough for its longest line, at least `RECOGNISER_WIDTH`."""
    return max(RECOGNISER_WIDTH, *(math.ceil(LINE_HEIGHT * part.width / part.height) for part in parts))


def turn(parts: Sequence[Image.Image], classify: Model) -> list[Image.Image]:
    """Turn the parts that stand on their heads."""
    turned: list[Image.Image] = []
    for start in range(0, len(parts), BATCH):
        chunk = parts[start : start + BATCH]
        for part, score in zip(chunk, classify(line_input(chunk, CLASSIFIER_WIDTH)), strict=True):
            head_down = score[1] > max(TURN_THRESHOLD, score[0])
            turned.append(part.transpose(Image.Transpose.ROTATE_180) if head_down else part)
    return turned


def decode(scores: Array, alphabet: Sequence[str]) -> tuple[str, float]:
    """The text of one line from [steps, characters]: best character per step, repeats merged, blanks dropped.

    Also the mean probability of the characters kept (0 for an empty line).
    """
    best = scores.argmax(axis=1)
    kept = np.flatnonzero((best != 0) & np.concatenate([[True], best[1:] != best[:-1]]))
    text = "".join(alphabet[i] for i in best[kept])
    return text, float(scores[kept, best[kept]].mean()) if len(kept) else 0.0


def recognise(parts: Sequence[Image.Image], model: Model, alphabet: Sequence[str]) -> list[tuple[str, float]]:
    """Text and score of each part, in the order given; batches hold lines of similar length."""
    order = sorted(range(len(parts)), key=lambda i: parts[i].width / parts[i].height)
    results: list[tuple[str, float]] = [("", 0.0)] * len(parts)
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        chunk = [parts[i] for i in chosen]
        for i, scores in zip(chosen, model(line_input(chunk, recognition_width(chunk))), strict=True):
            results[i] = decode(scores, alphabet)
    return results


def read(picture: Image.Image, models: Models, alphabet: Sequence[str]) -> tuple[Line, ...]:
    """All lines of text in a picture, in reading order."""
    probability = models.detect(detection_input(picture))[0, 0]
    found = boxes(probability, picture.size)
    if not found:
        return ()
    parts = turn([cut_out(picture, box) for box in found], models.classify)
    texts = recognise(parts, models.recognise, alphabet)
    lines = (Line(text, score, box) for (text, score), box in zip(texts, found, strict=True))
    return tuple(line for line in lines if line.score >= SCORE_THRESHOLD)


def annotate(picture: Image.Image, lines: Sequence[Line]) -> Image.Image:
    """A copy of the picture with each line's box and its number."""
    copy = picture.convert("RGB")
    pen = ImageDraw.Draw(copy)
    for number, line in enumerate(lines, start=1):
        corners = [(float(x), float(y)) for x, y in line.corners]
        pen.line([*corners, corners[0]], fill=(230, 80, 0), width=3)
        pen.text((corners[0][0] + 2, corners[0][1] - 18), str(number), fill=(230, 80, 0), font_size=16)
    return copy
