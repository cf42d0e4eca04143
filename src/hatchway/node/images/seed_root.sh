#!/bin/sh
# Finishes the root tree of the template `seed` (the only argument), after its packages were installed.
set -eu
root=$1

# What the build needed of the host must not stay: how it reaches its mirrors, and which they are. The sources are those
# that the distribution's own apt package ships as its example.
rm -f "$root/etc/apt/apt.conf.d/99mmdebstrap"
rm -rf "$root/etc/apt/auth.conf.d" "$root/etc/apt/sources.list" "$root/etc/apt/sources.list.d"
install -d -m 0755 "$root/etc/apt/auth.conf.d" "$root/etc/apt/sources.list.d"
for example in "$root"/usr/share/doc/apt/examples/*.sources; do
  if [ -f "$example" ]; then
    grep -v '^#' "$example" > "$root/etc/apt/sources.list.d/$(basename "$example")"
  fi
done
if [ -z "$(ls -A "$root/etc/apt/sources.list.d")" ]; then
  grep '^deb ' "$root/usr/share/doc/apt/examples/sources.list" > "$root/etc/apt/sources.list"
fi
rm -rf "$root/usr/share/doc/apt/examples"

chroot "$root" useradd --create-home --uid 1000 --user-group --shell /bin/bash --password '*' user
install -d -m 0750 "$root/etc/sudoers.d"
printf 'user ALL=(ALL:ALL) NOPASSWD:ALL\n' > "$root/etc/sudoers.d/user"
chmod 0440 "$root/etc/sudoers.d/user"
ln -s /usr/bin/python3 "$root/usr/local/bin/python"

chroot "$root" python3 -I - < "$(dirname "$0")/seed_wheels.py"

# A sandbox is one user's and is thrown away: pip may install into it.
printf '[global]\nbreak-system-packages = true\nroot-user-action = ignore\ndisable-pip-version-check = true\n' > "$root/etc/pip.conf"

# The host name changes with every sandbox and must resolve without a network (sudo asks for it).
rm -f "$root/etc/hostname" "$root/etc/resolv.conf" "$root/etc/hosts"
printf 'sandbox\n' > "$root/etc/hostname"
printf '127.0.0.1\tlocalhost sandbox\n::1\tlocalhost ip6-localhost ip6-loopback\n' > "$root/etc/hosts"
printf 'nameserver 10.200.0.1\n' > "$root/etc/resolv.conf"
sed -i 's/^hosts:.*/hosts: files myhostname dns/' "$root/etc/nsswitch.conf"
printf 'LANG=C.UTF-8\n' > "$root/etc/default/locale"
: > "$root/etc/machine-id"
rm -f "$root/var/lib/dbus/machine-id"
rm -f "$root"/etc/ssh/ssh_host_*

# Without these nothing is slower, and every build is the same.
rm -rf "$root/var/cache/apt" "$root/var/lib/apt/lists" "$root/var/cache/debconf"/*-old "$root/var/lib/dpkg"/*-old
install -d -m 0755 "$root/var/cache/apt/archives/partial" "$root/var/lib/apt/lists/partial"
rm -f "$root"/etc/*- "$root/var/cache/ldconfig/aux-cache" "$root/etc/.pwd.lock"
find "$root/var/log" "$root/tmp" "$root/run" -mindepth 1 -delete
