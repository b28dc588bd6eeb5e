"""webagent-rl for verl: parts of webagent_core registered under verl's own names, and a CPU platform.

verl finds `verl_webagent.plugin` by its entry point and imports it in every process; nothing has to be configured.
"""
