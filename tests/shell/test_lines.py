from __future__ import annotations

import csv
import io

import pytest

from commandbus.exceptions import InvalidCommandError
from commandbus.shell.lines import Format, Line, lines_of

LONGEST = 200


def read(content: str | bytes, format: Format = "jsonl", longest: int = LONGEST) -> list[Line]:  # noqa: A002
    stream = io.BytesIO(content.encode() if isinstance(content, str) else content)
    return list(lines_of(stream, format, longest))


def problems(lines: list[Line]) -> dict[int, str | None]:
    return {line.number: line.problem for line in lines}


def test_each_line_of_json_is_a_command() -> None:
    [first, second] = read('{"data": {"n": 1}}\n\n  \r\n{"data": {}, "type": "Ship", "delay": 3}\r\n')
    assert (first.number, first.fields) == (1, {"data": {"n": 1}})
    assert (second.number, second.fields) == (4, {"data": {}, "type": "Ship", "delay": 3})
    assert second.raw == b'{"data": {}, "type": "Ship", "delay": 3}\r\n'


@pytest.mark.parametrize("format", ["jsonl", "csv"])
def test_a_byte_order_mark_belongs_to_the_file_and_not_to_the_first_line(format: Format) -> None:  # noqa: A002
    body = {"jsonl": '{"data": {"a": "é"}}', "csv": "a\né"}[format]
    assert [line.fields for line in read(b"\xef\xbb\xbf" + body.encode(), format)] == [{"data": {"a": "é"}}]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"data": {}', "not JSON: Expecting ',' delimiter at character 12"),
        (b"[1]", "a JSON object is needed, not [1]"),
        (b'{"data": {}, "Type": "Ship", "x": 1}', "unknown: 'Type', 'x'; the keys are command_id, type, data, "),
        (b'{"type": "Ship"}', 'there is no data; write "data": {} if it has none'),
        (b'{"data": "\xff"}', "not UTF-8: invalid start byte at byte 11; convert the file"),
        (b'{"data": ' + b"9" * 5000 + b"}", "not JSON that can be read: Exceeds the limit"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_line_that_cannot_be_read_is_named_and_the_next_one_is_read(line: bytes, problem: str) -> None:
    wrong, right = read(line + b'\n{"data": {}}\n', longest=1_000_000)
    assert wrong.problem is not None
    assert wrong.problem.startswith(problem)
    assert wrong.raw == line + b"\n"
    assert (right.number, right.problem, right.fields) == (2, None, {"data": {}})


@pytest.mark.parametrize("format", ["jsonl", "csv"])
def test_a_line_that_is_too_long_comes_in_pieces(format: Format) -> None:  # noqa: A002
    header = {"jsonl": b"", "csv": b"n\n"}[format]
    content = b"x" * 450 + b"\n"
    good = {"jsonl": b'{"data": {"n": "1"}}', "csv": b"1"}[format]
    lines = read(header + content + good, format)
    assert [len(line.raw) for line in lines] == [200, 200, 51, len(good)]
    assert [line.continues for line in lines] == [False, True, True, False]
    assert (lines[0].problem or "").startswith("longer than 200 bytes")
    assert lines[3].fields == {"data": {"n": "1"}}
    assert b"".join(line.raw for line in lines) == content + good


def test_a_file_may_end_in_a_line_that_is_too_long() -> None:
    assert [len(line.raw) for line in read(b"x" * 450)] == [200, 200, 50]


def test_the_columns_of_csv_are_the_data_unless_they_mean_something() -> None:
    [line] = read("account,type,delay,command_id,reply_to,amount\r\nDE-1,Debit,1.5,abc,,5\r\n", "csv")
    assert line.fields == {
        "type": "Debit",
        "delay": 1.5,
        "command_id": "abc",
        "reply_to": None,
        "data": {"account": "DE-1", "amount": "5"},
    }


def test_a_column_data_holds_json() -> None:
    [line, wrong] = read('type,data\nDebit,"{""amount"": 5}"\nDebit,{\n', "csv")
    assert line.fields == {"type": "Debit", "data": {"amount": 5}}
    assert wrong.problem is not None
    assert wrong.problem.startswith("the column data is not JSON: ")


def test_a_record_that_is_broken_in_the_middle_is_in_error_as_a_whole() -> None:
    """Its rest must not be taken for a record: it would be sent."""
    text = b'invoice,comment\n1,"caf\xc3\xa9\nbl\xe9\nsee, below"\n2,ok\n'
    broken, good = read(text, "csv")
    assert (broken.number, broken.fields) == (2, None)
    assert "not UTF-8" in (broken.problem or "")
    assert broken.raw == b'1,"caf\xc3\xa9\nbl\xe9\nsee, below"\n'
    assert good.fields == {"data": {"invoice": "2", "comment": "ok"}}


def test_a_record_of_csv_may_take_several_lines() -> None:
    lines = read('a,b\n"one\ntwo",2\n\n"three",4\n', "csv")
    assert [(line.number, line.fields) for line in lines] == [
        (2, {"data": {"a": "one\ntwo", "b": "2"}}),
        (5, {"data": {"a": "three", "b": "4"}}),
    ]
    assert lines[0].raw == b'"one\ntwo",2\n'


def test_a_record_that_cannot_be_read_is_named_and_the_next_one_is_read() -> None:
    lines = read(b'a,delay\n1\n"x"y,1\nc\xff,1\nd,soon\nright,\n"never closed,1\n', "csv")
    assert problems(lines) == {
        2: "1 cells, where the header has 2",
        3: "not CSV: ',' expected after '\"'",
        4: "not UTF-8: invalid start byte at byte 2; convert the file",
        5: "delay must be a number of seconds, not 'soon'",
        6: None,
        7: "not CSV: unexpected end of data",
    }
    assert b"".join(line.raw for line in lines).endswith(b'right,\n"never closed,1\n')


def test_a_quote_that_is_never_closed_takes_no_more_than_the_longest_line() -> None:
    content = 'a\n"open\n' + 30 * "0123456789\n" + "\nright\n"
    lines = read(content, "csv", longest=100)
    assert lines[0].problem == "longer than 100 bytes, or has a quote that is not closed"
    assert len(lines[0].raw) < 120
    assert lines[-1].fields == {"data": {"a": "right"}}


def test_a_cell_may_be_as_long_as_a_line_and_the_limit_of_the_csv_module_comes_back() -> None:
    before = csv.field_size_limit()
    [line] = read(f"a\n{'x' * 200_000}\n", "csv", longest=1_000_000)
    assert line.fields == {"data": {"a": "x" * 200_000}}
    assert csv.field_size_limit() == before


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"", "there is no header"),
        (b"\n1,2\n", "there is no header"),
        (b"a,,b\n", "column 2 of the header has no name"),
        (b"a,b,a\n", "the header has the column 'a' twice"),
        (b"data,amount\n", "beside the column data, the header has 'amount'; the others are command_id, type, "),
        (b'"a"b\n', "the header cannot be read: ',' expected"),
        (b"\xff\n", "the header cannot be read: not UTF-8"),
    ],
)
def test_a_wrong_header_is_named_at_once(header: bytes, problem: str) -> None:
    with pytest.raises(InvalidCommandError) as caught:
        read(header, "csv")
    assert problem in str(caught.value)
