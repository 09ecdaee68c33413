"""Maps the top-level folders to sub-packages of the one import package `headrace`."""

from setuptools import find_packages, setup

TOP = ("cli", "engine", "platforms")

setup(
    package_dir={f"headrace.{top}": top for top in TOP},
    packages=[
        name
        for top in TOP
        for name in (f"headrace.{top}", *(f"headrace.{top}.{sub}" for sub in find_packages(top)))
    ],
    package_data={"": ["py.typed", "*.json", "*.jinja"]},
)
