"""Pre- and post-processing of text recognition, with made-up models (no weights, no network)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from demo import ocr


def test_decode_merges_repeats_and_drops_blanks() -> None:
    alphabet = ("", "a", "b", " ")
    steps = [1, 1, 0, 1, 2, 2, 3, 0, 2]
    scores = np.full((len(steps), 4), 0.1, np.float32)
    scores[np.arange(len(steps)), steps] = 0.7
    assert ocr.decode(scores, alphabet) == ("aab b", pytest.approx(0.7))
    assert ocr.decode(np.eye(4, dtype=np.float32)[[0, 0]], alphabet) == ("", 0.0)


def test_characters_come_from_the_metadata(tmp_path: Path) -> None:
    graph = onnx.helper.make_graph([], "empty", [], [])
    model = onnx.helper.make_model(graph)
    onnx.helper.set_model_props(model, {"character": "x\ny\nz"})
    onnx.save(model, tmp_path / "with.onnx")
    assert ocr.characters(tmp_path / "with.onnx") == ("", "x", "y", "z", " ")
    onnx.save(onnx.helper.make_model(graph), tmp_path / "without.onnx")
    with pytest.raises(ValueError, match="without.onnx"):
        ocr.characters(tmp_path / "without.onnx")


@pytest.mark.parametrize("size", [(640, 480), (33, 700), (3000, 1000), (10, 10)])
def test_detection_input_has_multiples_of_32(size: tuple[int, int]) -> None:
    array = ocr.detection_input(Image.new("RGB", size, (255, 0, 0)))
    assert array.shape[:2] == (1, 3)
    assert array.shape[2] % 32 == 0 and array.shape[3] % 32 == 0 and max(array.shape) <= ocr.LONGEST_SIDE
    assert np.array_equal(array[0, :, 0, 0], [-1, -1, 1])  # blue, green, red


def test_boxes_of_a_synthetic_map_are_scaled_and_ordered() -> None:
    probability = np.zeros((100, 200), np.float32)
    probability[10:18, 20:80] = 0.9
    probability[12:20, 120:180] = 0.9
    probability[60:70, 30:100] = 0.8
    probability[90:92, 5:7] = 0.9  # too small
    probability[80:88, 120:180] = 0.4  # too weak
    found = ocr.boxes(probability, (400, 200))
    assert [int(box[:, 0].mean()) for box in found] == [99, 299, 129]
    assert found[0][0, 1] < 20 and found[0][2, 1] > 34


def test_cut_out_turns_a_tall_box() -> None:
    picture = Image.new("RGB", (100, 100))
    box = np.array([(10.0, 10.0), (20.0, 10.0), (20.0, 70.0), (10.0, 70.0)])
    assert ocr.cut_out(picture, box).size == (60, 10)


def test_cut_out_follows_the_direction_of_the_box() -> None:
    picture = Image.new("L", (100, 100), 0)
    picture.paste(255, (50, 0, 100, 100))
    box = np.array([(30.0, 20.0), (70.0, 20.0), (70.0, 40.0), (30.0, 40.0)])
    flat = np.asarray(ocr.cut_out(picture, box))
    assert flat.shape == (20, 40)
    assert flat[:, :19].max() == 0 and flat[:, 21:].min() == 255


def test_line_input_scales_and_pads_with_zeros() -> None:
    batch = ocr.line_input([Image.new("RGB", (96, 24), (255, 255, 255)), Image.new("RGB", (900, 24))], 320)
    assert batch.shape == (2, 3, 48, 320)
    assert np.all(batch[0, :, :, :192] == 1) and np.all(batch[0, :, :, 192:] == 0)
    assert np.all(batch[1] == -1)
    assert ocr.recognition_width([Image.new("RGB", (900, 24))]) == 1800


def test_read_with_made_up_models() -> None:
    """Two lines, the second upside down; the recogniser says which of the two it saw by the mean grey."""
    picture = Image.new("RGB", (320, 128), (10, 10, 10))
    picture.paste((120, 120, 120), (20, 10, 200, 40))
    picture.paste((250, 250, 250), (20, 80, 200, 110))

    def detect(x: ocr.Array) -> ocr.Array:
        return (x[:, :1] > -0.5).astype(np.float32)

    def classify(x: ocr.Array) -> ocr.Array:
        return np.tile(np.array([[0.05, 0.95]], np.float32), (len(x), 1))

    def recognise(x: ocr.Array) -> ocr.Array:
        index = (x[:, 0, 24, 100] > 0.5).astype(int) + 1
        return np.eye(3, dtype=np.float32)[index][:, None]

    lines = ocr.read(picture, ocr.Models(detect, classify, recognise), ("", "a", "b"))
    assert [(line.text, line.score) for line in lines] == [("a", 1.0), ("b", 1.0)]
    assert ocr.annotate(picture, lines).size == picture.size


def test_read_finds_nothing_on_an_empty_page() -> None:
    models = ocr.Models(lambda x: x[:, :1] * 0, lambda x: x, lambda x: x)
    assert ocr.read(Image.new("RGB", (64, 64)), models, ("",)) == ()
