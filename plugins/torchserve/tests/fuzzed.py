"""Readers of what TorchServe's users bring; `tests/fuzz/readers.py` says what is done with them."""

from pathlib import Path

from modelyard.archiver.untrusted.json import parse_json
from modelyard.plugins.torchserve.arguments import parse_command_line
from modelyard.plugins.torchserve.configuration import load_configuration
from modelyard.plugins.torchserve.log4j import read_log_config
from modelyard.plugins.torchserve.properties import format_properties, parse_properties
from modelyard.plugins.torchserve.snapshot import parse_model_snapshot
from modelyard.serve.errors import StartError
from tests.fuzz.readers import Reader, of_file, texts


def _properties(data: bytes) -> None:
    values = parse_properties(data.decode("latin-1"))
    assert parse_properties(format_properties(values)) == values, "another when written and read"


def _configuration(file: Path) -> None:
    options = parse_command_line(["--start", "--ts-config", str(file)])
    load_configuration(options, {}, file.parent)


PROPERTIES = (
    "# a remark\ninference_address=http://127.0.0.1:8080\nload_models=a.mar,\\\n  b.mar\n"
    "number_of_netty_threads : 4\nmodel_store=\\u002ftmp\nenable_envvars_config=true\n"
    'models={"m": {"1.0": {"minWorkers": 1}}}\n'
)
LOG4J = (
    '<?xml version="1.0"?>\n<Configuration><Appenders><Console name="c"><PatternLayout '
    'pattern="%d{ISO8601} [%-5p] %t %c - %m%n"/></Console><RollingFile name="f" '
    'fileName="${env:LOGS:-logs}/ts.log" filePattern="logs/ts.log.%i.gz"><Policies>'
    '<SizeBasedTriggeringPolicy size="100 MB"/></Policies></RollingFile></Appenders><Loggers>'
    '<Logger name="org.pytorch.serve" level="debug"><AppenderRef ref="f"/></Logger>'
    '<Root level="info"><AppenderRef ref="c"/></Root></Loggers></Configuration>'
)
SNAPSHOT = (
    '{"name": "s", "modelCount": 1, "models": {"m": {"1.0": {"defaultVersion": true, "marName": '
    '"m.mar", "minWorkers": 1, "maxWorkers": 1, "batchSize": 1, "maxBatchDelay": 100, '
    '"responseTimeout": 120}}}}'
)
_START = (StartError,)
_CORPORA = Path(__file__).with_name("corpus")
READERS = (
    Reader("properties", _properties, _START, texts(PROPERTIES), _CORPORA),
    Reader(
        "configuration", of_file(_configuration, "config.properties"), _START, texts(PROPERTIES)
    ),
    Reader(
        "log4j",
        of_file(lambda file: read_log_config(file, {}, file.parent), "log4j2.xml"),
        _START,
        texts(LOG4J),
        _CORPORA,
    ),
    Reader(
        "snapshot",
        lambda data: parse_model_snapshot(parse_json(data)),
        (StartError, ValueError),
        texts(SNAPSHOT),
        _CORPORA,
    ),
)
