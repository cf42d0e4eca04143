/* The command line, the claim of a parked shim, and files of NUL-ended strings. */
#include "shim.h"

#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

bool failed(char *error, const char *format, ...)
{
	va_list list;
	va_start(list, format);
	vsnprintf(error, ERROR_BYTES, format, list);
	va_end(list);
	return false;
}

bool failed_errno(char *error, const char *format, ...)
{
	int number = errno;
	va_list list;
	va_start(list, format);
	int used = vsnprintf(error, ERROR_BYTES, format, list);
	va_end(list);
	if (used >= 0 && used < ERROR_BYTES)
		snprintf(error + used, ERROR_BYTES - (size_t)used, ": %s", strerror(number));
	return false;
}

void config_init(struct config *config)
{
	memset(config, 0, sizeof *config);
	config->control_fd = config->root_fd = config->argv_fd = config->env_fd = -1;
	config->report_fd = config->netns_fd = config->tap_fd = config->tree_fd = config->proc_fd = -1;
	config->rules_fd = -1;
	for (int i = 0; i < MAX_HELD; i++)
		config->held_fd[i] = -1;
	config->nofile = 4096;
	config->fsize = ULLONG_MAX;
	config->nproc = ULLONG_MAX;
}

static bool number(const char *text, unsigned long long highest, unsigned long long *value)
{
	unsigned long long sum = 0;
	if (*text == 0)
		return false;
	for (; *text; text++) {
		if (*text < '0' || *text > '9')
			return false;
		unsigned digit = (unsigned)(*text - '0');
		if (sum > (ULLONG_MAX - digit) / 10)
			return false;
		sum = sum * 10 + digit;
	}
	*value = sum;
	return sum <= highest;
}

static bool descriptor(const char *text, int *fd)
{
	unsigned long long value;
	if (!number(text, MAX_FD, &value))
		return false;
	*fd = (int)value;
	return true;
}

static bool identifier(const char *text, char *id)
{
	if (strlen(text) != ID_LENGTH)
		return false;
	for (const char *c = text; *c; c++)
		if (!((*c >= 'a' && *c <= 'z') || (*c >= '0' && *c <= '9')))
			return false;
	memcpy(id, text, ID_LENGTH + 1);
	return true;
}

static bool target(const struct config *config, int to)
{
	if (to < MIN_TARGET_FD || to > MAX_TARGET_FD || to == config->tap_to)
		return false;
	for (int i = 0; i < config->passes; i++)
		if (config->pass[i].to == to)
			return false;
	return true;
}

static bool pass_pair(struct config *config, const char *text)
{
	char first[8] = {0};
	const char *colon = strchr(text, ':');
	if (config->passes == MAX_PASS || colon == NULL || (size_t)(colon - text) >= sizeof first)
		return false;
	memcpy(first, text, (size_t)(colon - text));
	struct pass *pass = &config->pass[config->passes];
	if (!descriptor(first, &pass->from) || !descriptor(colon + 1, &pass->to) || !target(config, pass->to))
		return false;
	config->passes++;
	return true;
}

static bool device(struct config *config, const char *name)
{
	/* A closed list: nobody can name a disk or memory of the host here. */
	if (config->devices == MAX_DEVICES || strcmp(name, "kvm") != 0)
		return false;
	snprintf(config->device[config->devices++], sizeof config->device[0], "%s", name);
	return true;
}

static bool valued(struct config *c, const char *name, const char *value, bool *known)
{
	unsigned long long n = 0;
	*known = true;
	if (!strcmp(name, "--id"))
		return identifier(value, c->id);
	if (!strcmp(name, "--uid"))
		return c->has_uid = number(value, UINT_MAX - 1, &n), c->uid = (uid_t)n, c->has_uid;
	if (!strcmp(name, "--gid"))
		return c->has_gid = number(value, UINT_MAX - 1, &n), c->gid = (gid_t)n, c->has_gid;
	if (!strcmp(name, "--generation"))
		return c->has_generation = number(value, LLONG_MAX, &c->generation);
	if (!strcmp(name, "--control-fd"))
		return descriptor(value, &c->control_fd);
	if (!strcmp(name, "--root-fd"))
		return descriptor(value, &c->root_fd);
	if (!strcmp(name, "--argv-fd"))
		return descriptor(value, &c->argv_fd);
	if (!strcmp(name, "--env-fd"))
		return descriptor(value, &c->env_fd);
	if (!strcmp(name, "--report-fd"))
		return descriptor(value, &c->report_fd);
	if (!strcmp(name, "--netns-fd"))
		return descriptor(value, &c->netns_fd);
	if (!strcmp(name, "--rules-fd"))
		return descriptor(value, &c->rules_fd);
	if (!strcmp(name, "--nft"))
		return c->nft = value, value[0] == '/';
	if (!strcmp(name, "--cgroup-fd"))
		return c->cgroups < MAX_CGROUPS && descriptor(value, &c->cgroup_fd[c->cgroups]) && ++c->cgroups;
	if (!strcmp(name, "--peer-uid")) {
		if (c->peers == MAX_PEERS || !number(value, UINT_MAX - 1, &n))
			return false;
		c->peer[c->peers++] = (uid_t)n;
		return true;
	}
	if (!strcmp(name, "--pass"))
		return pass_pair(c, value);
	if (!strcmp(name, "--tap")) {
		int to;
		if (!descriptor(value, &to) || !target(c, to))
			return false;
		c->tap_to = to;
		return true;
	}
	if (!strcmp(name, "--dev"))
		return device(c, value);
	if (!strcmp(name, "--nofile"))
		return number(value, 1 << 20, &c->nofile) && c->nofile >= 64;
	if (!strcmp(name, "--fsize"))
		return number(value, LLONG_MAX, &c->fsize);
	if (!strcmp(name, "--nproc"))
		return number(value, 1 << 20, &c->nproc) && c->nproc >= 1;
	*known = false;
	return false;
}

bool config_parse(struct config *config, int count, char *const *words, char *error)
{
	for (int i = 0; i < count; i++) {
		bool known;
		if (!strcmp(words[i], "--no-userns-drop"))
			config->no_userns_drop = true;
		else if (!strcmp(words[i], "--network"))
			config->network = true;
		else if (!strcmp(words[i], "--park"))
			config->park = true;
		else if (!strcmp(words[i], "--paths"))
			config->paths = true;
		else if (i + 1 == count)
			return failed(error, "%.40s: unknown, or without its value", words[i]);
		else if (!valued(config, words[i], words[i + 1], &known))
			return known ? failed(error, "%s %.60s: not a usable value", words[i], words[i + 1])
			             : failed(error, "%.40s: no such argument", words[i]);
		else
			i++;
	}
	return true;
}

bool config_complete(const struct config *c, char *error)
{
	if (c->id[0] == 0 || !c->has_generation || c->control_fd < 0 || c->root_fd < 0 || c->argv_fd < 0 || c->env_fd < 0 ||
	    c->report_fd < 0)
		return failed(error, "--id, --generation and the control, root, argv, env and report descriptors are needed");
	if (!c->no_userns_drop && (!c->has_uid || !c->has_gid || c->uid == 0))
		return failed(error, "--uid (not 0) and --gid are needed");
	if (c->tap_to != 0 && c->tap_fd < 0)
		return failed(error, "--tap needs --network");
	return true;
}

char **read_strings(int fd, const char *what, char *error)
{
	struct stat stat;
	if (fstat(fd, &stat) < 0 || !S_ISREG(stat.st_mode) || stat.st_size > MAX_STRINGS_BYTES)
		return failed(error, "%s: not a regular file of at most %d octets", what, MAX_STRINGS_BYTES), NULL;
	size_t size = (size_t)stat.st_size;
	char *text = malloc(size + 1);
	char **list = calloc(MAX_STRINGS + 1, sizeof *list);
	if (text == NULL || list == NULL || pread(fd, text, size, 0) != (ssize_t)size || (size > 0 && text[size - 1] != 0)) {
		free(text);
		free(list);
		return failed(error, "%s: cannot be read, or its last string does not end with NUL", what), NULL;
	}
	size_t count = 0;
	for (size_t at = 0; at < size; at += strlen(text + at) + 1) {
		if (count == MAX_STRINGS) {
			free(text);
			free(list);
			return failed(error, "%s: more than %d strings", what, MAX_STRINGS), NULL;
		}
		list[count++] = text + at;
	}
	if (count == 0) /* nothing points into it */
		free(text);
	return list;
}
