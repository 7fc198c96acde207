"""`--log-config`: log4j 2's XML → what is logged, where to.

Levels, appenders, patterns and rotation are followed; what is not is named once, in a warning.

Source: https://logging.apache.org/log4j/2.x/manual/configuration.html
"""

import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.parsers import expat

from modelyard.plugins.torchserve import logs
from modelyard.plugins.torchserve.layout import FINEST, BadPattern, DateFormat, Layout, Warn
from modelyard.serve.errors import StartError

MOST_BYTES = 1 << 20
MOST_DEPTH = 32
MOST_LOOKUPS = 100
"""Replaced in one value; a property may name another."""
LOG4J_DEFAULT_KEPT = 7

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|b|k|kb|m|mb|g|gb)", re.IGNORECASE)
_LOOKUP = re.compile(r"\$\{([^${}]*)\}")
_DATE_IN_NAME = re.compile(r"%d(?:ate)?(?:\{([^}]*)\})?")
_SILENT = ("io.", "org.apache.", "org.eclipse.", "TELEMETRY_METRICS.")
"""Loggers of Java's libraries, and one of TorchServe's own file: nothing here logs there."""
_KNOWN = (*logs.LOGGERS, logs.THEIR_LOGGER, "org", "org.pytorch")


@dataclass
class Node:
    """One component of a configuration, its type and attributes in lower case."""

    type: str
    line: int = 0
    attributes: dict[str, str] = field(default_factory=dict)
    children: list["Node"] = field(default_factory=list)
    text: str = ""
    is_read: bool = False

    def get(self, name: str) -> str | None:
        """Return an attribute that is there and not empty."""
        return self.attributes.get(name, "").strip() or None

    def all(self, *kinds: str) -> Iterator["Node"]:
        """Yield children of these types."""
        for child in self.children:
            if child.type in kinds:
                child.is_read = True
                yield child

    def below(self, section: str, *kinds: str) -> Iterator["Node"]:
        """Yield what stands in children of this type, and is of one of these."""
        return (each for child in self.all(section) for each in child.all(*kinds))

    def unread(self) -> Iterator["Node"]:
        """Yield the outermost components that nobody has asked for."""
        for child in self.children:
            yield from child.unread() if child.is_read else (child,)

    @property
    def place(self) -> str:
        """The line, before an error."""
        return f"line {self.line}: " if self.line else ""


def read_log_config(
    file: Path, environment: Mapping[str, str], directory: Path
) -> tuple[logs.LogConfig, list[str]]:
    """Read a file; return also what of it is not followed.

    Args:
        environment: what `${env:NAME}` stands for.
        directory: relative names of log files start there.

    Raises:
        StartError: it cannot be read, or is broken; the message names the line where it can.
    """
    warnings: list[str] = []

    def warn(text: str) -> None:
        warning = f"--log-config {file}: {text}"
        if warning not in warnings:
            warnings.append(warning)

    try:
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
    except OSError as error:
        raise StartError(f"--log-config {file}: cannot be read: {error.strerror}") from error
    if len(content) > MOST_BYTES:
        raise StartError(f"--log-config {file}: it is larger than {MOST_BYTES >> 20} MB")
    try:
        if not content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
            raise _Broken(
                "it does not begin as XML; write it as log4j 2's XML, as TorchServe's log4j2.xml "
                "is (properties, JSON and YAML are not read)"
            )
        config = _Reader(environment, directory, warn).read(_parse_xml(content))
    except _Broken as error:
        raise StartError(f"--log-config {file}: {error}") from error
    return config, warnings


class _Broken(Exception):
    """The file says something impossible."""


# -- XML -----------------------------------------------------------------------------------------


def _parse_xml(content: bytes) -> Node:
    """Read XML without document types, hence without entities of its own.

    Raises:
        _Broken: it is not that.
    """
    root = Node("")
    open_nodes = [root]
    parser = expat.ParserCreate()

    def start(name: str, attributes: dict[str, str]) -> None:
        if len(open_nodes) > MOST_DEPTH:
            raise _Broken(f"line {parser.CurrentLineNumber}: more than {MOST_DEPTH} levels")
        low = {key.lower(): value for key, value in attributes.items()}
        kind = name.rpartition(":")[2].lower()
        if kind in ("appender", "layout", "filter") and low.get("type"):
            kind = low["type"].lower()  # log4j's strict form
        node = Node(kind, parser.CurrentLineNumber, low)
        open_nodes[-1].children.append(node)
        open_nodes.append(node)

    def characters(text: str) -> None:
        open_nodes[-1].text += text

    def refuse(*_: object) -> None:
        raise _Broken(
            f"line {parser.CurrentLineNumber}: a document type is not read; take out <!DOCTYPE …>"
        )

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda name: open_nodes.pop()
    parser.CharacterDataHandler = characters
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(content, True)
    except expat.ExpatError as error:
        text = expat.errors.messages[error.code]
        raise _Broken(f"line {error.lineno}, column {error.offset + 1}: {text}") from error
    except (LookupError, ValueError) as error:
        raise _Broken(str(error)) from error
    (top,) = root.children
    if top.type != "configuration":
        raise _Broken(f"line {top.line}: expected <Configuration>, got <{top.type}>")
    return top


# -- the tree ------------------------------------------------------------------------------------


class _Reader:
    """Reads one tree."""

    def __init__(self, environment: Mapping[str, str], directory: Path, warn: Warn) -> None:
        self._environment = environment
        self._directory = directory
        self._warn = warn
        self._properties: dict[str, str] = {}
        self._appenders: dict[str, logs.Appender] = {}
        self._passed_on: dict[str, list[tuple[str, int]]] = {}
        """Appender that writes nothing itself → those it hands records to, and from which level."""

    def read(self, top: Node) -> logs.LogConfig:
        """Return what log4j 2's tree says.

        Raises:
            _Broken: it is impossible.
        """
        for each in top.below("properties", "property"):
            self._properties[each.get("name") or ""] = each.get("value") or each.text.strip()
        self._fill(top)
        if top.get("monitorinterval"):
            self._warn("monitorInterval is not followed: a change counts from the next start")
        for node in (each for section in top.all("appenders") for each in section.children):
            node.is_read, name = True, node.get("name")
            if not name:
                raise _Broken(f"{node.place}an appender has no name")
            if node.type in ("async", "failover", "rewrite"):
                self._passed_on[name] = [self._reference(each) for each in node.all("appenderref")]
            elif (appender := self._appender(name, node)) is not None:
                self._appenders[name] = appender
            else:
                self._passed_on[name] = []
        loggers: dict[str, logs.LoggerRule] = {}
        for node in top.below("loggers", "root", "asyncroot", "logger", "asynclogger"):
            name = node.get("name")
            if node.type in ("root", "asyncroot"):
                loggers[""] = self._rule(node, logs.LEVELS["ERROR"])
            elif not name:
                raise _Broken(f"{node.place}a logger has no name")
            elif not f"{name}.".startswith(_SILENT):
                if name not in _KNOWN and f"{name}.".partition(".")[0] != logs.OWN_LOGGER:
                    there = ", ".join([*logs.LOGGERS, logs.THEIR_LOGGER])
                    self._warn(f"nothing logs to {name!r}; the loggers are {there} and modelyard.*")
                loggers[name] = self._rule(node, None)
        # Without a root of the file's own log4j writes errors to the console.
        if "" not in loggers:
            self._appenders.setdefault("STDOUT", logs.Appender("STDOUT"))
            loggers[""] = logs.LoggerRule(logs.LEVELS["ERROR"], (("STDOUT", 0),))
        for node in top.unread():
            self._warn(f"{node.place}<{node.type}> is not followed")
        return logs.LogConfig(self._appenders, loggers)

    def _rule(self, node: Node, default: int | None) -> logs.LoggerRule:
        references: list[tuple[str, int]] = []
        for each in node.all("appenderref"):
            name, least = self._reference(each)
            if name not in self._appenders and name not in self._passed_on:
                there = ", ".join([*self._appenders, *self._passed_on]) or "none"
                self._warn(f"{each.place}there is no appender {name!r}; there are: {there}")
            references += [
                (to, max(least, of_it))
                for to, of_it in self._passed_on.get(name, [(name, 0)])
                if to in self._appenders
            ]
        is_additive = (node.get("additivity") or "true").lower() != "false"
        level = self._level(node) if node.get("level") else default
        return logs.LoggerRule(level, tuple(references), is_additive)

    def _reference(self, node: Node) -> tuple[str, int]:
        name = node.get("ref")
        if name is None:
            raise _Broken(f"{node.place}an AppenderRef names no appender")
        return name, max(self._level(node), self._threshold(node))

    def _threshold(self, node: Node) -> int:
        """Return the level from which filters let records pass."""
        least = 0
        for each in (*node.all("thresholdfilter"), *node.below("filters", "thresholdfilter")):
            passes = (each.get("onmatch") or "neutral").lower() != "deny"
            stops = (each.get("onmismatch") or "deny").lower() == "deny"
            if each.get("level") and passes and stops:
                least = max(least, self._level(each))
            else:
                self._warn(f"{each.place}this <thresholdfilter> is not followed")
        return least

    def _level(self, node: Node) -> int:
        """Return the level that a component names; 0 where it names none."""
        name = node.get("level")
        if name is None:
            return 0
        if (level := logs.LEVELS.get(name.upper())) is None:
            there = ", ".join(each for each in logs.LEVELS if each != "WARNING")
            raise _Broken(f"{node.place}there is no level {name!r}; levels are {there}")
        return level

    # -- appenders -------------------------------------------------------------------------------

    def _appender(self, name: str, node: Node) -> logs.Appender | None:
        """Return an appender; None for one that writes nowhere."""
        kind = node.type.removesuffix("appender")
        if kind == "null":
            return None
        pattern, threshold = self._pattern(node), self._threshold(node)
        if kind == "console":
            target = (node.get("target") or "SYSTEM_OUT").upper()
            return logs.Appender(name, pattern, is_stderr="ERR" in target, threshold=threshold)
        if kind not in ("file", "rollingfile", "randomaccessfile", "rollingrandomaccessfile"):
            self._warn(
                f"the appender {name!r} of type {node.type} is not followed: it writes nothing"
            )
            node.children.clear()
            return None
        file = node.get("filename")
        rolling = self._rolling(node) if kind.startswith("rolling") else None
        if file is None:
            raise _Broken(f"{node.place}the appender {name!r} has no fileName")
        appends = (node.get("append") or "true").lower() != "false"
        return logs.Appender(
            name, pattern, self._directory / file, False, threshold, appends, rolling
        )

    def _pattern(self, node: Node) -> str:
        for layout in node.all("patternlayout"):
            inside = next((each.text.strip("\r\n\t ") for each in layout.all("pattern")), None)
            pattern = layout.attributes.get("pattern") or inside or "%m%n"
            Layout(pattern, warn=self._warn)
            return pattern
        has_layout = any(each.type.endswith("layout") for each in node.children)
        return logs.WITH_THREAD if has_layout else "%m%n"

    def _rolling(self, node: Node) -> logs.Rolling:
        rolling = logs.Rolling(None, None, keep=LOG4J_DEFAULT_KEPT)
        name = node.get("filepattern")
        for policies in (node, *node.all("policies")):
            for each in policies.all("sizebasedtriggeringpolicy"):
                rolling = replace(rolling, max_bytes=_size(each.get("size") or "10 MB", each))
            for each in policies.all("timebasedtriggeringpolicy"):
                rolling = replace(rolling, period=self._period(name or ""))
                if (each.get("interval") or "1") != "1":
                    self._warn("an interval of several periods is not followed: each ends a file")
            if any(policies.all("onstartuptriggeringpolicy")):
                rolling = replace(rolling, at_start=True)
        for each in node.all("defaultrolloverstrategy"):
            most = each.get("max") or str(LOG4J_DEFAULT_KEPT)
            if not most.isdecimal() or not 0 < int(most) < 10_000:
                raise _Broken(f"{each.place}{most!r} is not a number of files from 1 to 9999")
            is_min = (each.get("fileindex") or "max").lower() == "min"
            rolling = replace(rolling, keep=int(most), newest_first=is_min)
        if name is None:
            return rolling
        if name.endswith((".zip", ".bz2", ".xz", ".zst", ".deflate")):
            self._warn(f"files put aside are packed as .gz, not {Path(name).suffix}")
            name = f"{name.rpartition('.')[0]}.gz"
        return replace(rolling, pattern=str(self._directory / name))

    def _period(self, name: str) -> str | None:
        """Return the field of the name's date that changes most often."""
        found = [match[1] or "yyyy-MM-dd" for match in _DATE_IN_NAME.finditer(name)]
        try:
            fields = {DateFormat(pattern).finest for pattern in found}
        except BadPattern as error:
            raise _Broken(f"filePattern: {error}") from error
        finest = next((each for each in FINEST if each in fields), None)
        if finest is None:
            self._warn("a TimeBasedTriggeringPolicy needs a %d in filePattern: it is not followed")
        return finest

    # -- values ----------------------------------------------------------------------------------

    def _fill(self, node: Node) -> None:
        """Put values where lookups stand, but for patterns, whose braces are others."""
        for key, value in node.attributes.items():
            node.attributes[key] = self.fill(value)
        node.text = self.fill(node.text)
        for child in node.children:
            self._fill(child)

    def fill(self, text: str) -> str:
        """Return a value with its lookups replaced, inner ones first."""
        text = text.replace("$${", "${")  # of lookups that log4j makes later
        for _ in range(MOST_LOOKUPS):
            match = _LOOKUP.search(text)
            if match is None:
                return text
            text = f"{text[: match.start()]}{self._value(match[1])}{text[match.end() :]}"
            if len(text) > MOST_BYTES:
                break
        raise _Broken("a property names itself")

    def _value(self, lookup: str) -> str:
        name, has_default, default = lookup.partition(":-")
        kind, colon, key = name.partition(":")
        if not colon:
            kind, key = "", name
        here, host = {"user.dir": str(self._directory), "file.separator": "/"}, socket.gethostname()
        known: dict[str, Mapping[str, str]] = {
            "": {"hostName": host, **self._environment, **self._properties},
            "env": self._environment,
            "sys": {**self._environment, **here},
            "date": {key: f"%d{{{key}}}"},
        }
        value = known.get(kind, {}).get(key, default if has_default else None)
        if value is not None:
            return value
        if kind in ("", "env") and key in ("LOG_LOCATION", "METRICS_LOCATION"):
            return "logs"
        self._warn(f"nothing says what ${{{lookup}}} stands for; it is left out")
        return ""


def _size(text: str, node: Node) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise _Broken(f"{node.place}{text!r} is not a size such as 100 MB")
    power = {"": 0, "b": 0, "k": 1, "m": 2, "g": 3}[match[2][:1].lower()]
    return max(1, int(float(match[1]) * 1024**power))


def find_log_config(option: str | None, vmargs: str, directory: Path) -> Path | None:
    """Return the file that the command line names, else what the Java options do."""
    if option:
        return directory / option
    for flag in vmargs.split():
        key, _, value = flag.removeprefix("-D").partition("=")
        if key in ("log4j.configurationFile", "log4j2.configurationFile"):
            return directory / (unquote(urlsplit(value).path) if ":" in value else value)
    return None
