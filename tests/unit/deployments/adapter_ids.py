"""Texts that are no adapter ids: ways out of a folder, encodings, and too much."""

NO_IDS = [
    "../x",
    "/etc/x",
    "a/../../x",
    "a%2f..",
    "a\\..\\b",
    "a\0b",
    ".",
    "..",
    ".hidden",
    "a/b/c",
    "a//b",
    "a/",
    "x" * 4000,
    "x ",
    " x",
    "x\n",
    "C:\\x",
    "s3://x",
    "ünïcode",
]
