"""What each command runs; a module is imported when its command runs, as some take seconds."""

import argparse


def up(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from coordinator.cli.up import run_up

    return run_up(options)


def process(options: argparse.Namespace) -> int:
    """Run one process of a cell."""
    from coordinator.cli.process import run_process

    given = (("--log-level", options.log_level), ("--log-format", options.log_format))
    words = [word for name, value in given if value is not None for word in (name, value)]
    return run_process(options.name, options.config, words)


def status(options: argparse.Namespace) -> int:
    """Show ranks, layout and queues."""
    from coordinator.cli.operate import run_status

    return run_status(options)


def switch(options: argparse.Namespace) -> int:
    """Change the layout."""
    from coordinator.cli.operate import run_switch

    return run_switch(options)


def put_back(options: argparse.Namespace) -> int:
    """Return a quarantined mode to service."""
    from coordinator.cli.operate import run_put_back

    return run_put_back(options)


def renew(options: argparse.Namespace) -> int:
    """Restart ranks together."""
    from coordinator.cli.operate import run_renew

    return run_renew(options)


def reload(options: argparse.Namespace) -> int:
    """Let the coordinator read its configuration file again."""
    from coordinator.cli.operate import run_reload

    return run_reload(options)


def usage(options: argparse.Namespace) -> int:
    """Show requests and tokens of each tenant."""
    from coordinator.cli.usage import run_usage

    return run_usage(options)


def explain(options: argparse.Namespace) -> int:
    """Show why the layout is what it is."""
    from coordinator.cli.operate import run_explain

    return run_explain(options)


def replay(options: argparse.Namespace) -> int:
    """Run a log of the adaptive policy again."""
    from coordinator.cli.replay import run_replay

    return run_replay(options)


def plan(options: argparse.Namespace) -> int:
    """Show what a model needs of GPUs."""
    from coordinator.cli.plan import run_plan

    return run_plan(options)


def key_new(options: argparse.Namespace) -> int:
    """Make an API key."""
    from coordinator.cli.keys import run_key_new

    return run_key_new(options)


def key_list(options: argparse.Namespace) -> int:
    """List API keys."""
    from coordinator.cli.keys import run_key_list

    return run_key_list(options)


def key_revoke(options: argparse.Namespace) -> int:
    """Revoke an API key."""
    from coordinator.cli.keys import run_key_revoke

    return run_key_revoke(options)


def config_check(options: argparse.Namespace) -> int:
    """Show every fault of a configuration."""
    from coordinator.cli.config import run_config_check

    return run_config_check(options)


def config_show(options: argparse.Namespace) -> int:
    """Show a whole configuration."""
    from coordinator.cli.config import run_config_show

    return run_config_show(options)


def config_schema(options: argparse.Namespace) -> int:
    """Print the JSON schema of configurations."""
    from coordinator.cli.config import run_config_schema

    return run_config_schema(options)
