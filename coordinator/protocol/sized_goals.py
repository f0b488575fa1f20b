"""Objectives by the model's size: replaces `slo.sizes` by those of the model that is served."""

import os
from collections.abc import Mapping

from coordinator.protocol.config import Config, ConfigError
from coordinator.protocol.engine_options import OptionError, last_value, read_options
from coordinator.protocol.model_files import Fetch, ModelFilesError, find_model
from coordinator.protocol.model_size import billions_of


def with_sized_goals(
    config: Config, environment: Mapping[str, str] = os.environ, fetch: Fetch | None = None
) -> Config:
    """Return the configuration with the objectives of its model's size; raises `ConfigError`.

    It reads config.json only if the objectives depend on the size.
    """
    if not config.slo.sizes:
        return config
    try:
        options, _ = read_options(config.model.engine_args)
        revision = last_value(options, "--revision") or ""
        found = find_model(config.model.path, environment, fetch, revision)
    except (ModelFilesError, OptionError) as error:
        raise ConfigError(str(error)) from error
    billions = billions_of(found.config) if found.config is not None else None
    if billions is None:
        raise ConfigError(
            f"slo.sizes: the config.json of {config.model.path} does not say how large the model "
            "is, or cannot be read: leave out slo.sizes and give its goals in slo itself."
        )
    return config.model_copy(update={"slo": config.slo.of_size(billions)})
