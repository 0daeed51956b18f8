import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image as transformers_load_image

from omnibal.data.sources.images import image_size, load_image


def picture(width=7, height=4, mode="RGB"):
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def save_turned(path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture().save(path, exif=exif)
    return path


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp", "a.tif", "a.gif", "a.bmp"])
def test_size_is_that_of_the_decoded_image(tmp_path, name):
    picture().save(tmp_path / name)
    assert image_size(tmp_path / name) == load_image(tmp_path / name).size == (7, 4)


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_images_are_upright_as_in_transformers(tmp_path, name, orientation):
    path = save_turned(tmp_path / name, orientation)
    expected = transformers_load_image(str(path))
    assert image_size(path) == expected.size
    assert np.array_equal(np.asarray(load_image(path)), np.asarray(expected))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_every_mode_becomes_rgb(tmp_path, mode):
    name = "a.jpg" if mode == "CMYK" else "a.png"
    picture(mode=mode).save(tmp_path / name)
    assert load_image(tmp_path / name).mode == "RGB"


def test_size_comes_from_the_header_alone(tmp_path):
    header = struct.pack(">IIBBBBB", 5000, 3000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    path = tmp_path / "cut.png"
    path.write_bytes(start + struct.pack(">I", 100) + b"IDAT" + b"\0" * 10)
    assert image_size(path) == (5000, 3000)
    with pytest.raises(ValueError, match=r"image must be decodable, got .*cut\.png"):
        load_image(path)


def test_missing_and_unreadable_files_are_named(tmp_path):
    (tmp_path / "text.png").write_text("no image")
    for read in (image_size, load_image):
        with pytest.raises(ValueError, match=r"image must exist, got .*none\.png"):
            read(tmp_path / "none.png")
        with pytest.raises(ValueError, match=r"readable header, got .*text\.png"):
            read(tmp_path / "text.png")
        with pytest.raises(ValueError, match="image must be readable"):
            read(tmp_path)
