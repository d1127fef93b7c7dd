"""What a run says: nothing as a function, unless logging shows it; a command line prints it."""

import logging

from ppo_parts.training._messages import logger
from tests.runs import go


def test_run_is_quiet_unless_logging_shows_its_messages(train, tmp_path, capsys, caplog):
    printers = logger.handlers[:]
    for printer in printers:
        logger.removeHandler(printer)
    logger.propagate = True
    with caplog.at_level(logging.INFO, "ppo_parts.training"):
        go(train, tmp_path, "run")
    assert capsys.readouterr().out == ""
    assert any("learning curve: " in message for message in caplog.messages)
    for printer in printers:
        logger.addHandler(printer)
