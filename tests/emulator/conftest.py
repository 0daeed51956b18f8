"""A plan's ds_config and lengths, as the commands' tests have them."""

from tests.cli.conftest import demo, ds_config, few_steps, token_lengths

__all__ = ["demo", "ds_config", "few_steps", "token_lengths"]
