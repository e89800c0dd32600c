"""Transforms and stopping rules from outside: how they are named, loaded, checked and put into a policy."""

from sampling.plugins.loading import Plugin, Plugins, load_plugins
from sampling.plugins.refs import PluginKind, PluginRef, PluginRefs
from sampling.plugins.stages import PluginRule, PluginStage

__all__ = [
    "Plugin",
    "PluginKind",
    "PluginRef",
    "PluginRefs",
    "PluginRule",
    "PluginStage",
    "Plugins",
    "load_plugins",
]
