"""The application for config files of Ray Serve, such as in KubeRay's RayService: `weft.server.ray.config_file:build`.

Needs `environment.SERVE` and `environment.RAY` in the environment of every node.
"""

import inspect
import os
from typing import Any

from ray import serve

from weft.server.ray.app import build_app
from weft.server.settings import Settings, StartError, resolve

_OF_RAY = inspect.signature(build_app).parameters.keys() - {"settings"}


def build(args: dict[str, Any]) -> serve.Application:
    """The application with the file's `args`: what `build_app` takes, and settings, which beat the environment's.

    Raises:
        StartError: A name is unknown, or as `resolve` and `build_app` raise it.
    """
    if unknown := args.keys() - _OF_RAY - Settings.model_fields.keys():
        raise StartError(f"args: no such setting: {min(unknown)}")
    if "port" in args:
        raise StartError(f"args: port: Ray listens, at the port of http_options, got {args['port']}")
    settings = {name: value for name, value in args.items() if name not in _OF_RAY}
    of_ray = {name: value for name, value in args.items() if name in _OF_RAY}
    return build_app(resolve(settings, os.environ).settings, **of_ray)
