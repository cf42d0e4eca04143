"""The agent's channel in the hands of root: lies, replays, octets that are no frames, and archives that no agent packed.

In a script, `a` is what speaks in the agent's place, when the host runs a command or copies a folder out.
"""

from hatchway.redteam.attacks.attack import SOURCE, Attack, table

RUNS, FLOODS, PACKS = "impostor-runs", "impostor-floods", "impostor-packs"
IMPOSTORS = (RUNS, FLOODS, PACKS)
"""The acts: the host runs commands; it does so while it is spoken to without an end; it copies a folder out."""
_ARCHIVE = "impostor(M, packed({}))"
_OUT = "facts['downloads'] + '/' + M + '/outside'"
_LINK = "('{}', {{'type': tarfile.SYMTYPE, 'linkname': {}}}, b'')"
_TOKEN = "facts['honey']"


def _deeds(deeds: dict[str, str]) -> dict[str, str]:
    return {name: f"def deed(a):\n    {deed}\nimpostor(M, deed)" for name, deed in deeds.items()}


ATTACKS: tuple[Attack, ...] = (
    *table("E07", "A lie of the agent's", _deeds({
        "output-of-an-ended-command": "a.output(a.first, B, len(B)); a.says(b'')",
        "output-of-an-ended-command-anew": "a.proc(a.first, a.first_key, 1); a.output(a.first, B, len(B)); a.says(b'')",
        "another-end-of-an-ended-command": "a.proc(a.first, a.first_key, 3, code=77, message=B); a.says(b'')",
        "output-of-another-sandboxs-command": "[(a.proc(n, a.args[1], 1), a.output(n, B)) for n in range(1, 20)]; a.says(b'')",
        "names-another-sandboxs-command": "a.key = a.args[1]; a.proc(a.number, a.key, 1); a.says(B)",
        "listed-another-sandboxs-command": "a.raw(a.greeting); a.proc(1, a.args[1], 1); a.raw(frames.frame(frames.READY, 0)); a.output(1, B); a.says(b'')",
        "key-that-is-a-path": "[a.proc(n, b'../' * n + b'tmp/' + B, 1) for n in range(1, 12)]; a.says(b'')",
        "key-that-is-a-path-of-ours": "a.key = b'../service/' + B; a.says(b'x')",
        "refusal-that-begins-a-line": "a.answer(a.request, (frames.MESSAGE, b'no\\n' + B + b' root logged in\\n'), status=22)",
        "end-that-begins-a-line": "a.answer(a.request, (frames.PID, 7)); a.proc(a.number, a.key, message=b'no\\n' + B + b' root logged in\\n')",
        "greeting-that-begins-a-line": "a.raw(frames.frame(frames.HELLO_ACK, 0, frames.fields((frames.BOOT_ID, b'x\\n' + B + b'\\n'), (frames.AGENT, b'x\\n' + B + b'\\n')))); a.says(b'')",
    }), (SOURCE,), RUNS),
    *table("E07", "Said once more", _deeds({
        "greeting-with-an-ended-command": "a.raw(a.greeting); a.proc(a.first, a.first_key, 1); a.raw(frames.frame(frames.READY, 0)); a.output(a.first, B, len(B)); a.says(b'')",
        "answer-to-an-older-request": "a.answer(a.request, (frames.PID, 7)); a.answer(a.request, (frames.MESSAGE, b'\\n' + B + b'\\n'), status=5); a.output(a.first, B, len(B)); a.proc(a.number, a.key)",
        "an-end": "a.says(b'x'); a.proc(a.number, a.key, 3, out=1, code=77); a.proc(a.first, a.first_key, 3, code=77, message=B)",
    }), (SOURCE,), RUNS),
    *table("E08", "Octets that are no frames", _deeds({
        "noise": "a.again_and_again(os.urandom(65536))",
        "zeros": "a.again_and_again(bytes(65536))",
        "beginnings": "a.again_and_again(frames.MAGIC * 16384)",
        "length-beyond": "a.again_and_again(frames.header(frames.OUTPUT, a.number, 0xffffffff) + bytes(65536))",
        "half-a-frame": "a.raw(frames.header(frames.RESPONSE, a.request, 65536) + B)",
        "other-end-of-a-frame": "a.again_and_again(frames.frame(frames.RESPONSE, a.request)[:-4] + b'\\0\\0\\0\\0' + bytes(65536))",
    }), (SOURCE,), FLOODS),
    *table("E08", "Frames without an end", _deeds({
        "smallest": "a.again_and_again(frames.frame(frames.READY, 0) * 4000)",
        "answers-to-nobody": "a.again_and_again(frames.frame(frames.RESPONSE, 1, frames.fields((frames.STATUS, 0))) * 2000)",
        "greetings": "a.again_and_again(a.greeting * 600)",
        "list": "a.raw(a.greeting); a.again_and_again(b''.join(frames.frame(frames.PROC, n, frames.fields((KEY, b'k%d' % n), (frames.STATE, 1))) for n in range(1, 2000)))",
        "output-beyond-credit": "a.answer(a.request, (frames.PID, 7)); [a.output(a.number, B * 4000, n * len(B) * 4000) for n in range(1500)]; a.again_and_again(b'')",
        "output-of-nobody": "a.again_and_again(frames.output(9999, 1, 0, B) * 1000)",
    }), (SOURCE,), FLOODS),
    *table("E13", "An archive that no agent packed", {
        name: _ARCHIVE.format(members) for name, members in {
            "dots": "('../outside', {}, B)",
            "dots-within": "('a/../../outside', {}, B)",
            "whole-path": f"({_OUT}, {{}}, B)",
            "link-then-file": f"{_LINK.format('l', _OUT)}, ('l', {{}}, B)",
            "link-then-below": f"{_LINK.format('d', chr(39) + '..' + chr(39))}, ('d/outside', {{}}, B)",
            "chain-of-links": f"{_LINK.format('a', chr(39) + '.' + chr(39))}, {_LINK.format('b', chr(39) + 'a/..' + chr(39))}, ('b/outside', {{}}, B)",
            "hard-link-then-file": f"('h', {{'type': tarfile.LNKTYPE, 'linkname': {_OUT}}}, b''), ('h', {{}}, B)",
            "hard-link-by-dots-then-file": "('h', {'type': tarfile.LNKTYPE, 'linkname': '../outside'}, b''), ('h', {}, B)",
            "hard-link-to-the-token": f"('h', {{'type': tarfile.LNKTYPE, 'linkname': {_TOKEN}}}, b'')",
            "link-to-the-token": _LINK.format("l", _TOKEN),
            "device": "('disk', {'type': tarfile.BLKTYPE, 'devmajor': facts['device'][0], 'devminor': facts['device'][1], 'mode': 0o666}, b'')",
            "set-user-id": "('sh', {'mode': 0o6755}, B)",
            "name-of-an-extension": "('fine', {'pax_headers': {'path': '../outside'}}, B)",
            "link-of-an-extension": f"('fine', {{'type': tarfile.SYMTYPE, 'linkname': 'x', 'pax_headers': {{'linkpath': {_TOKEN}}}}}, b'')",
            "gnu-long-name": "('../' + './' * 60 + 'outside', {}, B), kind=tarfile.GNU_FORMAT",
        }.items()
    }, (SOURCE,), PACKS),
)  # fmt: skip
