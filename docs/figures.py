"""The pictures of the pages, small enough to be kept (run: python docs/figures.py; needs matplotlib).

They are those of `posenc-ext plot --length 100 --d-model 128`, with as few colours as a picture needs.
docs/figures/layer.svg is drawn by hand.
"""

from pathlib import Path

from PIL import Image

from posenc_ext.cli import main

FOLDER = Path(__file__).parent / "figures"

if __name__ == "__main__":
    main(["plot", "--length", "100", "--d-model", "128", "--output", str(FOLDER)])
    for path in FOLDER.glob("*.png"):
        picture = Image.open(path).convert("RGB")
        picture.resize((picture.width * 2 // 3, picture.height * 2 // 3), Image.Resampling.LANCZOS).quantize(48).save(
            path, optimize=True
        )
