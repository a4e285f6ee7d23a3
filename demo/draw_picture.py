"""Draw `picture.png`: text in several fonts and sizes, two scripts, one rotated line, one line upside down.

Needs the Debian packages fonts-dejavu-core, fonts-liberation, fonts-freefont-ttf and fonts-noto-cjk. Only
the picture is kept in the repository, so nobody else needs the fonts: `python -m demo.draw_picture` draws
it anew.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

HERE = Path(__file__).resolve().parent
TRUETYPE = Path("/usr/share/fonts/truetype")
SIZE = (1024, 768)

DARK = (38, 42, 52)
PAPER = (236, 232, 222)


@dataclass(frozen=True)
class Label:
    """One line of text: its font file, size in pixels, colour, centre, anticlockwise angle in degrees,
    space between words.

    `space` multiplies the font's own space: the recogniser was trained mostly on Chinese and leaves out
    narrow ones.
    """

    text: str
    font: Path
    size: int
    colour: tuple[int, int, int]
    centre: tuple[int, int]
    angle: float = 0.0
    space: float = 1.0


CJK = Path("/usr/share/fonts/opentype/noto/NotoSansCJK-Regular.ttc")
LIBERATION = TRUETYPE / "liberation"
DEJAVU = TRUETYPE / "dejavu"
FREE = TRUETYPE / "freefont"

LABELS = (
    Label("Harbour Museum", DEJAVU / "DejaVuSerif-Bold.ttf", 56, (150, 32, 40), (512, 74), space=1.3),
    Label("Ships, maps and instruments", LIBERATION / "LiberationSerif-Italic.ttf", 38, DARK, (512, 146)),
    Label(
        "Open daily 09:30-18:45", LIBERATION / "LiberationSans-Regular.ttf", 32, DARK, (260, 236), space=1.2
    ),
    Label("EXIT 24B", FREE / "FreeSansBold.ttf", 54, (250, 250, 250), (810, 246), space=1.6),
    Label("Tickets 12.50 and 16.00", DEJAVU / "DejaVuSansMono-Bold.ttf", 26, DARK, (264, 298), space=1.2),
    Label("Free entry on the first Sunday", FREE / "FreeSerif.ttf", 30, (24, 70, 120), (256, 356), space=1.6),
    Label("欢迎参观海港博物馆", CJK, 44, DARK, (260, 446)),
    Label("Follow the green line", DEJAVU / "DejaVuSerif.ttf", 28, (14, 96, 50), (786, 450), angle=14.0),
    Label("Telephone 040-4281-3367", DEJAVU / "DejaVuSansMono.ttf", 28, DARK, (256, 526)),
    Label(
        "The library closes at noon",
        LIBERATION / "LiberationSansNarrow-Bold.ttf",
        34,
        DARK,
        (780, 580),
        180.0,
    ),
    Label(
        "Please mind the step",
        LIBERATION / "LiberationSerif-BoldItalic.ttf",
        24,
        (120, 40, 90),
        (246, 610),
        space=1.2,
    ),
    Label(
        "Printed in the year 2026",
        LIBERATION / "LiberationSerif-Regular.ttf",
        18,
        DARK,
        (512, 716),
        space=1.2,
    ),
)


def background(seed: int = 7) -> Image.Image:
    """A paper-coloured board with faint grain, a dark sign and a few shapes that are not text."""
    board = Image.new("RGB", SIZE, PAPER)
    shade = Image.linear_gradient("L").resize(SIZE).point(lambda v: v // 10)
    board = Image.composite(Image.new("RGB", SIZE, (205, 198, 180)), board, shade)
    pen = ImageDraw.Draw(board)
    pen.rounded_rectangle((650, 196, 970, 296), radius=14, fill=(28, 104, 66))
    pen.line((60, 186, 964, 186), fill=(176, 160, 130), width=3)
    pen.rectangle((60, 672, 964, 676), fill=(176, 160, 130))
    pen.ellipse((560, 320, 620, 380), outline=(24, 70, 120), width=6)
    pen.polygon([(560, 640), (620, 640), (590, 590)], fill=(150, 32, 40))
    source = random.Random(seed)
    for _ in range(900):
        x, y = source.randrange(SIZE[0]), source.randrange(SIZE[1])
        pen.point((x, y), fill=(214, 208, 194))
    return board


def draw_label(board: Image.Image, label: Label) -> None:
    """Draw one label onto `board`, in place: on a transparent layer of its own, turned about its centre."""
    font = ImageFont.truetype(label.font, label.size)
    words = label.text.split(" ")
    step = font.getlength(" ") * label.space
    starts = [0.0]
    for word in words[:-1]:
        starts.append(starts[-1] + font.getlength(word) + step)
    left, top, right, bottom = font.getbbox(label.text)
    width = int(starts[-1] + font.getlength(words[-1]) - left) + 8
    layer = Image.new("RGBA", (max(width, 8), int(bottom - top) + 8), (*label.colour, 0))
    pen = ImageDraw.Draw(layer)
    for start, word in zip(starts, words, strict=True):
        pen.text((4 - left + start, 4 - top), word, font=font, fill=(*label.colour, 255))
    if label.angle:
        layer = layer.rotate(label.angle, resample=Image.Resampling.BICUBIC, expand=True)
    place = (label.centre[0] - layer.width // 2, label.centre[1] - layer.height // 2)
    board.paste(layer, place, layer)


def draw() -> Image.Image:
    """The whole picture."""
    board = background()
    for label in LABELS:
        draw_label(board, label)
    return board


def main() -> None:
    """Write the picture and the strings that are on it, in reading order."""
    draw().save(HERE / "picture.png", optimize=True)
    (HERE / "expected.txt").write_text("".join(label.text + "\n" for label in LABELS), encoding="utf-8")
    print(f"wrote picture.png, {(HERE / 'picture.png').stat().st_size} bytes")


if __name__ == "__main__":
    main()
