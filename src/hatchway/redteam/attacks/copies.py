"""Copies out of and into a sandbox, whose client is the host: links that lead elsewhere. What is changed or read beside the folder that a copy is for counts."""

from hatchway.redteam.attacks.attack import BLOCKED, Attack, table

_HERE = "p = place(M); o = outside(M); "


def _twice(first: str, then: str = "pass") -> str:
    """A folder that is copied twice to one place; what is in it changes between."""
    return _HERE + f"{first}\nhold(M, 'first')\n{then}\nhold(M, 'second')"


ATTACKS: tuple[Attack, ...] = (
    *table("E11", "Copied out, twice", {
        "link-then-file": _twice("os.symlink(o, p + '/l')", "os.unlink(p + '/l'); open(p + '/l', 'wb').write(B)"),
        "relative-link-then-file": _twice("os.symlink('../outside', p + '/l')", "os.unlink(p + '/l'); open(p + '/l', 'wb').write(B)"),
        "link-to-a-folder-then-folder": _twice("os.symlink(os.path.dirname(o), p + '/d')", "os.unlink(p + '/d'); os.mkdir(p + '/d'); open(p + '/d/outside', 'wb').write(B)"),
        "links-upwards-then-folder": _twice("os.symlink('..', p + '/d')", "os.unlink(p + '/d'); os.mkdir(p + '/d'); open(p + '/d/outside', 'wb').write(B)"),
        "chain-of-links": _twice("os.mkdir(p + '/a'); os.symlink('a/..', p + '/b'); os.symlink('b/..', p + '/c')", "os.unlink(p + '/c'); os.mkdir(p + '/c'); open(p + '/c/outside', 'wb').write(B)"),
        "link-to-the-token": _twice("os.symlink(facts['honey'], p + '/token')"),
        "folder-of-the-token": _twice("os.symlink(os.path.dirname(facts['honey']), p + '/tokens')"),
        "root-of-processes": _twice("os.symlink('/proc/self/root' + facts['honey'], p + '/token')"),
        "device": _twice("os.mknod(p + '/disk', 0o60666, os.makedev(*facts['device']))"),
        "set-user-id": _twice("open(p + '/sh', 'wb').write(B); os.chmod(p + '/sh', 0o6755)"),
    }, (BLOCKED,), "copies-out"),
    *table("E12", "Copied in, by somebody who has links of another's making", {
        "link-to-a-file": _HERE + "hold(M, 'first'); look(p + '-in/link')",
        "link-to-a-folder": _HERE + "hold(M, 'first'); look(p + '-in/folder/' + os.path.basename(facts['honey']))",
        "there-and-back": _HERE + "os.symlink(facts['honey'], p + '/token'); hold(M, 'first'); look(p + '-in/token')",
        "there-and-back-relative": _HERE + "os.symlink('../' * 30 + facts['honey'][1:], p + '/token'); hold(M, 'first'); look(p + '-in/token')",
        "there-and-back-by-a-folder": _HERE + "os.symlink(os.path.dirname(facts['honey']), p + '/tokens'); hold(M, 'first'); look(p + '-in/tokens/' + os.path.basename(facts['honey']))",
    }, (BLOCKED,), "copies-in"),
)  # fmt: skip
