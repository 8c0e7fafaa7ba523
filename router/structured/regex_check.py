"""Which regular expressions xgrammar (0.2.8) matches as they are meant. Pure.

Found by experiment: it refuses look-around, back references, word boundaries, inline flags and Unicode
classes; it *warns* of anchors in the middle and of unknown escapes and then matches something else. All of
these raise ClientError here, with the position.
"""

from baton.core.errors import ClientError

REGEX_CHARACTERS_MAX = 8192
SIZE_MAX = 20_000
"""Elements, with repetitions written out: each is a state of the compiled automaton."""
DEPTH_MAX = 64

_CLASS_ESCAPES = frozenset("dwsDWS")
_CONTROL_ESCAPES = frozenset("tnrfv")
_JSON_UNSAFE = frozenset('"\\')


class _Regex:
    def __init__(self, text: str, where: str, *, in_json: bool) -> None:
        self.text, self.where, self.in_json = text, where, in_json
        self.at = 0

    def check(self) -> None:
        self._alternatives(depth=0)
        if self.at < len(self.text):
            self._refuse("unmatched ')'")

    def _refuse(self, what: str) -> None:
        raise ClientError(
            f"{self.where}: {what} at position {self.at} of the regular expression {self.text!r:.200}",
            param=self.where,
            code="unsupported_grammar",
        )

    def _peek(self, ahead: int = 0) -> str:
        at = self.at + ahead
        return self.text[at] if at < len(self.text) else ""

    def _alternatives(self, *, depth: int) -> int:
        """Returns how many elements they are, repetitions written out."""
        if depth > DEPTH_MAX:
            self._refuse(f"more than {DEPTH_MAX} nested groups")
        start, size = self.at, 0
        while (char := self._peek()) and char != ")":
            if char == "|":
                self.at += 1
                start = self.at
            elif char == "^":
                if self.at != start:
                    self._refuse("'^' that is not at the beginning")
                self.at += 1
                start = self.at
            elif char == "$":
                self.at += 1
                if self._peek() not in ("", "|", ")"):
                    self._refuse("'$' that is not at the end")
            else:
                size += self._atom(depth) * self._quantifier()
                if size > SIZE_MAX:
                    self._refuse(f"more than {SIZE_MAX} elements, repetitions written out,")
        return size

    def _atom(self, depth: int) -> int:
        char = self._peek()
        if char == "(":
            return self._group(depth)
        if char == "[":
            self._class()
        elif char == "\\":
            self._escape()
        elif char in "*+?{":
            self._refuse(f"nothing to repeat before {char!r}")
        elif char in "]}":
            self._refuse(f"{char!r} without its beginning; write it with a backslash")
        else:
            self._literal(char)
            self.at += 1
        return 1

    def _literal(self, char: str) -> None:
        if self.in_json and (char in _JSON_UNSAFE or char < " "):
            self._refuse(f"{char!r}, which JSON writes with an escape, is not supported in a pattern")

    def _group(self, depth: int) -> int:
        self.at += 1
        if self._peek() == "?":
            if self._peek(1) == ":":
                self.at += 2
            elif self._peek(1) == "<" and self._peek(2) not in ("=", "!"):
                end = self.text.find(">", self.at)
                if end < 0 or not self.text[self.at + 2 : end].isidentifier():
                    self._refuse("a group's name is malformed")
                self.at = end + 1
            else:
                self._refuse("look-around, flags and other special groups are not supported")
        size = self._alternatives(depth=depth + 1)
        if self._peek() != ")":
            self._refuse("missing ')'")
        self.at += 1
        return max(1, size)

    def _class(self) -> None:
        self.at += 1
        if self._peek() == "^":
            self.at += 1
        if self._peek() == "]":
            self._refuse("an empty character class")
        while (char := self._peek()) != "]":
            if not char:
                self._refuse("missing ']'")
            low = self._class_item()
            if self._peek() == "-" and self._peek(1) not in ("]", ""):
                self.at += 1
                high = self._class_item()
                if low is None or high is None or high < low:
                    self._refuse("a malformed range in a character class")
        self.at += 1

    def _class_item(self) -> str | None:
        """The character, None for a class such as \\d."""
        char = self._peek()
        if char == "\\":
            return self._escape()
        if char == "[" and self._peek(1) in (":", ".", "="):
            self._refuse("POSIX classes are not supported")
        self.at += 1
        return char

    def _escape(self) -> str | None:
        """The character it stands for; None: a class of them."""
        char = self._peek(1)
        if char in _CLASS_ESCAPES and char:
            self.at += 2
            return None
        if char in ("x", "u"):
            digits = self.text[self.at + 2 : self.at + (4 if char == "x" else 6)]
            if len(digits) != (2 if char == "x" else 4) or not all(
                d in "0123456789abcdefABCDEF" for d in digits
            ):
                self._refuse(f"a malformed \\{char} escape")
            found = chr(int(digits, 16))
            self._literal(found)
            self.at += 2 + len(digits)
            return found
        if char in _CONTROL_ESCAPES and char:
            if self.in_json:
                self._refuse(f"\\{char}, which JSON writes with an escape, is not supported in a pattern")
            self.at += 2
            return "\t\n\r\f\v"["tnrfv".index(char)]
        if not char or char.isalnum():
            self._refuse(f"the escape \\{char} is not supported")
        self._literal(char)
        self.at += 2
        return char

    def _quantifier(self) -> int:
        """How often at most, 1 without bound: a loop costs no more states."""
        char, times = self._peek(), 1
        if char in ("*", "+", "?") and char:
            self.at += 1
        elif char == "{":
            times = self._counted()
        else:
            return 1
        if self._peek() == "?":
            self.at += 1
        if self._peek() in ("*", "+", "?", "{") and self._peek():
            self._refuse("two quantifiers in a row")
        return times

    def _counted(self) -> int:
        end = self.text.find("}", self.at)
        low, _comma, high = self.text[self.at + 1 : max(end, 0)].partition(",")
        if end < 0 or not _is_count(low) or not (not high or _is_count(high)):
            self._refuse("a malformed {…}")
        times = int(high) if high else int(low)
        if times < int(low):
            self._refuse("{…} with its upper bound below the lower one")
        self.at = end + 1
        return max(1, times)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 6


def check_pattern(text: str, where: str, *, in_json: bool) -> None:
    """`in_json`: the text is matched as the inside of a JSON string, before it is unescaped.

    Raises ClientError.
    """
    if len(text) > REGEX_CHARACTERS_MAX:
        raise ClientError(
            f"{where} may have at most {REGEX_CHARACTERS_MAX} characters, not {len(text)}", param=where
        )
    _Regex(text, where, in_json=in_json).check()
