# SPDX-License-Identifier: Apache-2.0
"""Odd picture files, a few pixels each, and what vLLM was seen to make of them.

``python -m pytest tests/versions/test_decoding.py`` compares. What another release makes otherwise
has its values here, and a job leaves it out (``s3ec/decoding.py``).
"""

from __future__ import annotations

import base64
from dataclasses import dataclass


@dataclass(frozen=True)
class Odd:
    """One file.

    Attributes:
        text: Its bytes in base64.
        seen: Up to vLLM 0.32, and from 0.33 on where that differs: size and SHA-256 of the pixels,
            and vLLM's content hash (0.31 and newer), 16 digits each.
    """

    text: str
    seen: tuple[tuple[str, str], ...]

    @property
    def data(self) -> bytes:
        """The file."""
        return base64.b64decode(self.text)

    def way(self, number: int) -> tuple[str, str]:
        """What vLLM makes of it: way 1 up to 0.32, way 2 from 0.33 on."""
        return self.seen[min(number, len(self.seen)) - 1]


ODD = {
    "rgb.png": Odd(
        "iVBORw0KGgoAAAANSUhEUgAAAAYAAAAECAIAAAAiZtkUAAAAV0lEQVR42gFMALP/AAADBgkMDxIVGBseISQn"
        "Ki0wMwA2OTw/QkVIS05RVFdaXWBjZmkAbG9ydXh7foGEh4qNkJOWmZyfAKKlqKuusbS3ur3Aw8bJzM/S1fM4"
        "HfXxum2iAAAAAElFTkSuQmCC",
        (("6x4 9557573d8bd82e37", "740dbf12d1fdfc0f"),),
    ),
    "rgb-trns.png": Odd(
        "iVBORw0KGgoAAAANSUhEUgAAAAYAAAAECAIAAAAiZtkUAAAABnRSTlMAAAADAAaFgxz9AAAAV0lEQVR42gFM"
        "ALP/AAADBgkMDxIVGBseISQnKi0wMwA2OTw/QkVIS05RVFdaXWBjZmkAbG9ydXh7foGEh4qNkJOWmZyfAKKl"
        "qKuusbS3ur3Aw8bJzM/S1fM4HfXxum2iAAAAAElFTkSuQmCC",
        (
            ("6x4 9557573d8bd82e37", "ebb2b7b5911428d0"),
            ("6x4 e1ec4476af31f810", "d0ce7bf7d8897c87"),
        ),
    ),
    "rgb16.png": Odd(
        "iVBORw0KGgoAAAANSUhEUgAAAAYAAAAEEAIAAABy9gVXAAAAn0lEQVR42gGUAGv/AAAAAwMGBgkJDAwPDxIS"
        "FRUYGBsbHh4hISQkJycqKi0tMDAzMwA2Njk5PDw/P0JCRUVISEtLTk5RUVRUV1daWl1dYGBjY2ZmaWkAbGxv"
        "b3JydXV4eHt7fn6BgYSEh4eKio2NkJCTk5aWmZmcnJ+fAKKipaWoqKurrq6xsbS0t7e6ur29wMDDw8bGycnM"
        "zM/P0tLV1XqZO+k3qdgvAAAAAElFTkSuQmCC",
        (("6x4 9557573d8bd82e37", "0135db4992bd7a86"),),
    ),
    "rgb16-trns.png": Odd(
        "iVBORw0KGgoAAAANSUhEUgAAAAYAAAAEEAIAAABy9gVXAAAABnRSTlMAAAMDBgbBbBSVAAAAn0lEQVR42gGU"
        "AGv/AAAAAwMGBgkJDAwPDxISFRUYGBsbHh4hISQkJycqKi0tMDAzMwA2Njk5PDw/P0JCRUVISEtLTk5RUVRU"
        "V1daWl1dYGBjY2ZmaWkAbGxvb3JydXV4eHt7fn6BgYSEh4eKio2NkJCTk5aWmZmcnJ+fAKKipaWoqKurrq6x"
        "sbS0t7e6ur29wMDDw8bGycnMzM/P0tLV1XqZO+k3qdgvAAAAAElFTkSuQmCC",
        (
            ("6x4 9557573d8bd82e37", "6fb46c1c30d51b80"),
            ("6x4 e1ec4476af31f810", "1e5419e2caeebd07"),
        ),
    ),
    "rgb-trns-late.png": Odd(
        "iVBORw0KGgoAAAANSUhEUgAAAAYAAAAECAIAAAAiZtkUAAAAV0lEQVR42gFMALP/AAADBgkMDxIVGBseISQn"
        "Ki0wMwA2OTw/QkVIS05RVFdaXWBjZmkAbG9ydXh7foGEh4qNkJOWmZyfAKKlqKuusbS3ur3Aw8bJzM/S1fM4"
        "HfXxum2iAAAABnRSTlMAAAADAAaFgxz9AAAAAElFTkSuQmCC",
        (
            ("6x4 9557573d8bd82e37", "8b3124f9458cec6b"),
            ("6x4 e1ec4476af31f810", "52b67728c29bcbf8"),
        ),
    ),
    "rgba.png": Odd(
        "iVBORw0KGgoAAAANSUhEUgAAAAYAAAAECAYAAACtBE5DAAAAGklEQVR4nGNkYGZj4OTk5EbHLGZmZk7UkQAA"
        "E5MFu7ZpMX4AAAAASUVORK5CYII=",
        (("6x4 383dad77eddd0cb3", "d73df2795fb7d2de"),),
    ),
    "la.png": Odd(
        "iVBORw0KGgoAAAANSUhEUgAAAAYAAAAECAQAAAAHDYbIAAAAFklEQVR4nGNkYODkhkFGMycEhwUnBwBKiQMD"
        "JipDzAAAAABJRU5ErkJggg==",
        (("6x4 24bf54ce04490ccf", "c8877491608f1628"),),
    ),
    "l.png": Odd(
        "iVBORw0KGgoAAAANSUhEUgAAAAYAAAAECAAAAACIbxGfAAAAGElEQVR4nGNk4OTk5ORkNOPk5OTkZEGhABJZ"
        "AWFLzDf3AAAAAElFTkSuQmCC",
        (("6x4 30e3ee3384f753ff", "fd2e0653a24b7ece"),),
    ),
    "l-trns.png": Odd(
        "iVBORw0KGgoAAAANSUhEUgAAAAYAAAAECAAAAACIbxGfAAAAAnRSTlMAAHaTzTgAAAAYSURBVHicY2Tg5OTk"
        "5GQ04+Tk5ORkQaEAElkBYUvMN/cAAAAASUVORK5CYII=",
        (("6x4 5f93d31fbd647a28", "8aca2093398356dd"),),
    ),
    "l16.png": Odd(
        "iVBORw0KGgoAAAANSUhEUgAAAAYAAAAEEAAAAADY/83cAAAAP0lEQVR42gE0AMv/AAMADAkVEh4bJyQwLQA5"
        "NkI/S0hUUV1aZmMAb2x4dYF+ioeTkJyZAKWirqu3tMC9ycbSz1HnE7Fkc60PAAAAAElFTkSuQmCC",
        (("6x4 51cfa32fece0135f", "8b087e539ad1f8ed"),),
    ),
    "bilevel.png": Odd(
        "iVBORw0KGgoAAAANSUhEUgAAAAYAAAAEAQAAAACFf3PuAAAAEElEQVR4nGNgYGBh+MPEAAADFAEDOWV7gQAA"
        "AABJRU5ErkJggg==",
        (("6x4 505a4ed4e144ad6b", "92bc56950dfae1b8"),),
    ),
    "p.png": Odd(
        "iVBORw0KGgoAAAANSUhEUgAAAAYAAAAEBAMAAABfKlNwAAAAGFBMVEXCxciipaiDholoa25NUFMyNTgbHiEF"
        "CAuk2PT/AAAAFElEQVR4nGMsf/+f5R4EMwgyMAAATh8IGNYTFKcAAAAASUVORK5CYII=",
        (("6x4 774dcb22a3f4e8d2", "fbd2b6b842e94d6e"),),
    ),
    "p-trns.png": Odd(
        "iVBORw0KGgoAAAANSUhEUgAAAAYAAAAEBAMAAABfKlNwAAAAGFBMVEXCxciipaiDholoa25NUFMyNTgbHiEF"
        "CAuk2PT/AAAACHRSTlMAZP///////zgFdvQAAAAUSURBVHicYyx//5/lHgQzCDIwAABOHwgY1hMUpwAAAABJ"
        "RU5ErkJggg==",
        (("6x4 28b44ea52b79fc2f", "e10379db11ad0a1c"),),
    ),
    "p-transparent.gif": Odd(
        "R0lGODlhBgAEAIIAAMLFyKKlqIOGiWhrbk1QUzI1OBseIQUICyH5BAEAAAEALAAAAAAGAAQAAAgWAA8cMECw"
        "gEECCAcoFMAwgEMAEAEEBAA7",
        (("6x4 4d7f50251b2a3ed4", "d8bac6430dfc29bf"),),
    ),
    "cmyk.tif": Odd(
        "SUkqAAgAAAAKAAABBAABAAAABgAAAAEBBAABAAAABAAAAAIBAwAEAAAAhgAAAAMBAwABAAAAAQAAAAYBAwAB"
        "AAAABQAAABEBBAABAAAAjgAAABUBAwABAAAABAAAABYBBAABAAAABAAAABcBBAABAAAAYAAAABwBAwABAAAA"
        "AQAAAAAAAAAIAAgACAAIAP/8+QD28/AA7ernAOTh3gDb2NUA0s/MAMnGwwDAvboAt7SxAK6rqAClop8AnJmW"
        "AJOQjQCKh4QAgX57AHh1cgBvbGkAZmNgAF1aVwBUUU4AS0hFAEI/PAA5NjMAMC0qAA==",
        (("6x4 9557573d8bd82e37", "6fb781d8ca7cbfbd"),),
    ),
    "cmyk.jpg": Odd(
        "/9j/7gAOQWRvYmUAZAAAAAAA/9sAQwACAQEBAQECAQEBAgICAgIEAwICAgIFBAQDBAYFBgYGBQYGBgcJCAYH"
        "CQcGBggLCAkKCgoKCgYICwwLCgwJCgoK/8AAFAgACAAQBEMRAE0RAFkRAEsRAP/EAB8AAAEFAQEBAQEBAAAA"
        "AAAAAAABAgMEBQYHCAkKC//EALUQAAIBAwMCBAMFBQQEAAABfQECAwAEEQUSITFBBhNRYQcicRQygZGhCCNC"
        "scEVUtHwJDNicoIJChYXGBkaJSYnKCkqNDU2Nzg5OkNERUZHSElKU1RVVldYWVpjZGVmZ2hpanN0dXZ3eHl6"
        "g4SFhoeIiYqSk5SVlpeYmZqio6Slpqeoqaqys7S1tre4ubrCw8TFxsfIycrS09TV1tfY2drh4uPk5ebn6Onq"
        "8fLz9PX29/j5+v/aAA4EQwBNAFkASwAAPwD5n8B/8EJv9Z/xIvX/AJev93/p9r5z8B/8EJv9Z/xIvX/l6/3f"
        "+n2vn/wH/wAEJv8AWf8AEi9f+Xr/AHf+n2v38r2zwH/wQm/1n/Ei9f8Al6/3f+n2vbPAf/BCb/Wf8SL1/wCX"
        "r/d/6fa9s8B/8EJv9Z/xIvX/AJev93/p9or/2Q==",
        (("16x8 99d5d447a50d7091", "f7b4be671555699a"),),
    ),
    "turned.jpg": Odd(
        "/9j/4AAQSkZJRgABAQAAAQABAAD/4QAiRXhpZgAATU0AKgAAAAgAAQESAAMAAAABAAYAAAAAAAD/2wBDAAIB"
        "AQEBAQIBAQECAgICAgQDAgICAgUEBAMEBgUGBgYFBgYGBwkIBgcJBwYGCAsICQoKCgoKBggLDAsKDAkKCgr/"
        "2wBDAQICAgICAgUDAwUKBwYHCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoK"
        "CgoKCgr/wAARCAAQABgDASIAAhEBAxEB/8QAHwAAAQUBAQEBAQEAAAAAAAAAAAECAwQFBgcICQoL/8QAtRAA"
        "AgEDAwIEAwUFBAQAAAF9AQIDAAQRBRIhMUEGE1FhByJxFDKBkaEII0KxwRVS0fAkM2JyggkKFhcYGRolJico"
        "KSo0NTY3ODk6Q0RFRkdISUpTVFVWV1hZWmNkZWZnaGlqc3R1dnd4eXqDhIWGh4iJipKTlJWWl5iZmqKjpKWm"
        "p6ipqrKztLW2t7i5usLDxMXGx8jJytLT1NXW19jZ2uHi4+Tl5ufo6erx8vP09fb3+Pn6/8QAHwEAAwEBAQEB"
        "AQEBAQAAAAAAAAECAwQFBgcICQoL/8QAtREAAgECBAQDBAcFBAQAAQJ3AAECAxEEBSExBhJBUQdhcRMiMoEI"
        "FEKRobHBCSMzUvAVYnLRChYkNOEl8RcYGRomJygpKjU2Nzg5OkNERUZHSElKU1RVVldYWVpjZGVmZ2hpanN0"
        "dXZ3eHl6goOEhYaHiImKkpOUlZaXmJmaoqOkpaanqKmqsrO0tba3uLm6wsPExcbHyMnK0tPU1dbX2Nna4uPk"
        "5ebn6Onq8vP09fb3+Pn6/9oADAMBAAIRAxEAPwD8hfD37Hf+u/4uL/d/5hH1/wCm1ekeHv2O/wDXf8XF/u/8"
        "wj6/9Nq/Wjw9+x3/AK7/AIuL/d/5hH1/6bV6R4e/Y7/13/Fxf7v/ADCPr/02roOc/Jfw9+x3/rv+Li/3f+YR"
        "9f8AptRX7YeHv2O/9d/xcX+7/wAwj6/9NqKAP//Z",
        (("16x24 44feb72b6dcad6c2", "b655f341ad394317"),),
    ),
    "turned.png": Odd(
        "iVBORw0KGgoAAAANSUhEUgAAAAYAAAAECAIAAAAiZtkUAAAAGmVYSWZNTQAqAAAACAABARIAAwAAAAEABgAA"
        "AAAAANZnS2kAAAAVSURBVHicY2RgZuNEBSxmZmZkCQEAlkoEGbzLX+YAAAAASUVORK5CYII=",
        (("4x6 1fff9e32b98e4275", "6981e6e2cc22b86e"),),
    ),
    "mirrored.tif": Odd(
        "SUkqAAgAAAALAAABBAABAAAABgAAAAEBBAABAAAABAAAAAIBAwADAAAAkgAAAAMBAwABAAAAAQAAAAYBAwAB"
        "AAAAAgAAABEBBAABAAAAmAAAABIBAwABAAAAAgAAABUBAwABAAAAAwAAABYBBAABAAAABAAAABcBBAABAAAA"
        "SAAAABwBAwABAAAAAQAAAAAAAAAIAAgACAAAAwYJDA8SFRgbHiEkJyotMDM2OTw/QkVIS05RVFdaXWBjZmls"
        "b3J1eHt+gYSHio2Qk5aZnJ+ipairrrG0t7q9wMPGyczP0tU=",
        (("6x4 5d21dda4a41afc47", "09d0a5efb65f2b93"),),
    ),
    "rgba.webp": Odd(
        "UklGRjYAAABXRUJQVlA4TCoAAAAvBcAAEM1lRP8Dito2YjpeR+j4c9sQpl8hgAAoaMSkaYjdtnICfIFq4gc=",
        (("6x4 383dad77eddd0cb3", "78db080c7225dd8e"),),
    ),
    "float.tif": Odd(
        "SUkqAAgAAAAKAAABBAABAAAABgAAAAEBBAABAAAABAAAAAIBAwABAAAAIAAAAAMBAwABAAAAAQAAAAYBAwAB"
        "AAAAAQAAABEBBAABAAAAhgAAABYBBAABAAAABAAAABcBBAABAAAAYAAAABwBAwABAAAAAQAAAFMBAwABAAAA"
        "AwAAAAAAAAAAAAAAAAAQQQAAkEEAANhBAAAQQgAANEIAAFhCAAB8QgAAkEIAAKJCAAC0QgAAxkIAANhCAADq"
        "QgAA/EIAAAdDAAAQQwAAGUMAACJDAAArQwAANEMAAD1DAABGQwAAT0M=",
        (("6x4 30e3ee3384f753ff", "f1a8978da8b6dee8"),),
    ),
}
