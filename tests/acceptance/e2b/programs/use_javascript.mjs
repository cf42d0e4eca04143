// Uses every public method of E2B's JavaScript SDK as its documentation shows, and tells what came of each: like use_python.py.
// Runs in the folder of the SDK's own environment: node use_javascript.mjs, with E2B_SDK naming that folder.

import { readFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { pathToFileURL } from 'node:url'

const folder = process.env.E2B_SDK
const require = createRequire(`${folder}/package.json`)
const { CommandExitError, E2B, Sandbox, Template, TimeoutError, Volume, Secret } = await import(pathToFileURL(require.resolve('e2b').replace(/index\.js$/, 'index.mjs')))
const manifest = JSON.parse(readFileSync(`${folder}/node_modules/e2b/package.json`, 'utf8'))
const PATIENCE_MS = 30_000
// One of Python takes seconds to start under emulation.
const SERVER = String.raw`exec perl -MIO::Socket::INET -e '
$s = IO::Socket::INET->new(Listen => 5, LocalAddr => "127.0.0.1", LocalPort => 8000, ReuseAddr => 1) or die;
while ($c = $s->accept) { while (<$c>) { last if /^\r\n$/ } print $c "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"; close $c }'`
const CLASSES = ['Sandbox', 'SandboxApi', 'Commands', 'CommandHandle', 'Pty', 'Filesystem', 'WatchHandle', 'Git', 'TemplateBase', 'Volume', 'Secret', 'SandboxPaginator', 'SnapshotPaginator', 'SecretPaginator', 'ReadyCmd']
// Classes with methods that are the SDK's own insides.
const NOT_ABOUT = ['ConnectionConfig', 'VolumeConnectionConfig', 'ClientFactory', 'ApiClient', 'EnvdApiClient', 'Paginator', 'LogEntry']
const OF_OTHERS = { SandboxApi: 'Sandbox', TemplateBase: 'Template' }

const uses = []
const results = {}
const asked = []

function use(methods, name, body) {
  uses.push({ methods: methods.split(' '), name, body })
}

const declarations = readFileSync(`${folder}/node_modules/e2b/dist/index.d.ts`, 'utf8')

/** The methods that a class declares, and nothing that belongs to all paginators alone. */
function methodsOf(name) {
  const start = declarations.search(new RegExp(`^declare (?:abstract )?class ${name}\\b`, 'm'))
  if (start < 0) return []
  const body = declarations.slice(start, declarations.indexOf('\n}', start))
  const found = [...body.matchAll(/^  (?:static )?(?:abstract )?([a-z]\w*)(?:<[^\n(]*>)?\(/gm)].map(([, method]) => method)
  return found.filter((method) => method !== 'constructor')
}

/** Classes with methods that nobody here has heard of; errors have none of their own. */
function unknown() {
  const declared = [...declarations.matchAll(/^declare (?:abstract )?class (\w+)/gm)].map(([, name]) => name)
  return declared.filter((name) => !CLASSES.includes(name) && !NOT_ABOUT.includes(name) && methodsOf(name).length)
}

/** The public methods, as the package's declarations have them. */
function published() {
  const found = new Set()
  for (const name of CLASSES) {
    for (const method of methodsOf(name)) found.add(`${OF_OTHERS[name] ?? name}.${method}`)
  }
  if (E2B) for (const name of Object.keys(new E2B({ apiKey: process.env.E2B_API_KEY }))) found.add(`E2B.${name}`)
  for (const method of Object.getOwnPropertyNames(Template)) {
    if (typeof Template[method] === 'function') found.add(`Template.${method}`)
  }
  return [...found].sort()
}

function assert(holds, what) {
  if (!holds) throw new Error(`it does not hold: ${what}`)
}

async function waitFor(holds, what) {
  const until = Date.now() + PATIENCE_MS
  for (;;) {
    const found = await holds()
    if (found) return found
    assert(Date.now() < until, what)
    await new Promise((done) => setTimeout(done, 100))
  }
}

async function all(pages) {
  const found = []
  while (pages.hasNext) found.push(...(await pages.nextItems()))
  return found
}

// -- sandboxes

use('Sandbox.create Sandbox.getInfo Sandbox.getFullInfo Sandbox.isRunning Sandbox.setTimeout', 'a sandbox', async () => {
  const made = await Sandbox.create({ timeoutMs: 120_000, metadata: { 'k y': 'v&1' }, envs: { A: '1' } })
  const info = await made.getInfo()
  assert(info.metadata['k y'] === 'v&1' && info.state === 'running', JSON.stringify(info))
  if (Sandbox.getFullInfo) await Sandbox.getFullInfo(made.sandboxId)
  assert(await made.isRunning(), 'it runs')
  await made.setTimeout(600_000)
  assert((await made.getInfo()).endAt - info.endAt > 300_000, 'it has longer')
  await made.kill()
  assert(!(await made.isRunning()), 'it is gone')
})

use('Sandbox.list SandboxPaginator.nextItems', 'a list', async (sandbox) => {
  assert((await all(Sandbox.list())).some((one) => one.sandboxId === sandbox.sandboxId), 'it is listed')
})

use('Sandbox.kill CommandHandle.wait', 'a kill', async () => {
  const made = await Sandbox.create({ timeoutMs: 60_000 })
  const handle = await made.commands.run('sleep 1000', { background: true, timeoutMs: 0 })
  const ended = handle.wait().then(() => 'an orderly end', (error) => error)
  assert((await Sandbox.kill(made.sandboxId)) === true, 'the first')
  const error = await ended
  assert(error instanceof TimeoutError, `the stream ends with an error of the SDK: ${error}`)
  assert((await Sandbox.kill(made.sandboxId)) === false, 'the second')
})

use('Sandbox.pause Sandbox.connect', 'a pause', async () => {
  const made = await Sandbox.create({ timeoutMs: 120_000 })
  for (let round = 0; round < 2; round++) {
    await made.pause()
    assert((await made.getInfo()).state === 'paused', 'paused')
    await Sandbox.connect(made.sandboxId, { timeoutMs: 120_000 })
    assert((await made.getInfo()).state === 'running', 'resumed')
  }
  await made.kill()
})

use('Sandbox.betaPause', 'a beta pause', async () => {
  const made = await Sandbox.create({ timeoutMs: 120_000 })
  await made.betaPause()
  assert((await made.getInfo()).state === 'paused', 'paused')
  await made.kill()
})

use('Sandbox.fork', 'a fork', async (sandbox) => {
  const [branch] = await sandbox.fork({ timeoutMs: 60_000 })
  if (branch instanceof Error) throw branch
  const made = branch.sandbox ?? branch
  assert(made.sandboxId !== sandbox.sandboxId, 'another one')
  await made.kill()
})

use('Sandbox.createSnapshot Sandbox.listSnapshots Sandbox.deleteSnapshot SnapshotPaginator.nextItems', 'snapshots', async (sandbox) => {
  const kept = await sandbox.createSnapshot()
  assert((await all(Sandbox.listSnapshots())).some((one) => one.snapshotId === kept.snapshotId), 'it is listed')
  await (await Sandbox.create(kept.snapshotId, { timeoutMs: 60_000 })).kill()
  assert((await Sandbox.deleteSnapshot(kept.snapshotId)) === true, 'deleted')
})

use('Sandbox.getMetrics', 'metrics', async (sandbox) => {
  const samples = await waitFor(async () => ((found) => found.length && found)(await sandbox.getMetrics()), 'a sample')
  assert(samples.at(-1).cpuCount >= 1, 'it has a processor')
})

use('Sandbox.getHost', 'a port', async (sandbox) => {
  assert(sandbox.getHost(8000).startsWith(`8000-${sandbox.sandboxId}.`), 'the name')
  await sandbox.commands.run(SERVER, { background: true, timeoutMs: 0 })
  const shared = process.env.E2B_SANDBOX_URL
  const headers = shared ? { 'E2b-Sandbox-Id': sandbox.sandboxId, 'E2b-Sandbox-Port': '8000' } : {}
  const base = shared ?? `https://${sandbox.getHost(8000)}`
  await waitFor(async () => (await fetch(`${base}/`, { headers })).status === 200, 'the port answers')
})

use('Sandbox.updateNetwork', 'a network', async (sandbox) => {
  await sandbox.updateNetwork({ denyOut: ['0.0.0.0/0'] })
  await sandbox.updateNetwork({})
})

use('Sandbox.uploadUrl Sandbox.downloadUrl', 'signed URLs', async (sandbox) => {
  const form = new FormData()
  form.append('file', new Blob(['by a link']), 'signed.txt')
  const put = await fetch(await sandbox.uploadUrl('signed.txt'), { method: 'POST', body: form })
  assert(put.ok, `uploaded: ${put.status}`)
  assert((await (await fetch(await sandbox.downloadUrl('signed.txt'))).text()) === 'by a link', 'the same')
})

use('Sandbox.getMcpUrl', 'an MCP URL', async (sandbox) => {
  assert(sandbox.getMcpUrl().includes(sandbox.sandboxId), 'it names the sandbox')
})

use('Sandbox.getMcpToken', 'an MCP token', async (sandbox) => {
  assert(await sandbox.getMcpToken(), 'there is one')
})

// -- commands

use('Commands.run', 'a command', async (sandbox) => {
  const told = []
  const done = await sandbox.commands.run('echo out; echo err >&2; printf $A', { envs: { A: 'x' }, onStdout: (text) => told.push(text) })
  assert(done.stdout === 'out\nx' && done.stderr === 'err\n' && done.exitCode === 0, JSON.stringify(done))
  assert(told.join('') === 'out\nx', 'told')
})

use('Commands.list Commands.kill CommandHandle.kill CommandHandle.wait CommandHandle.disconnect Commands.connect', 'commands', async (sandbox) => {
  const handle = await sandbox.commands.run('sleep 100', { background: true })
  assert((await sandbox.commands.list()).some((one) => one.pid === handle.pid), 'it is listed')
  await handle.disconnect()
  assert(await (await sandbox.commands.connect(handle.pid)).kill(), 'killed')
  const other = await sandbox.commands.run('sleep 100', { background: true })
  assert(await sandbox.commands.kill(other.pid), 'killed by its number')
  assert(!(await sandbox.commands.kill(999_999)), 'nobody there')
  const third = await sandbox.commands.run('echo done', { background: true })
  assert((await third.wait()).stdout === 'done\n', 'its output')
})

use('Commands.sendStdin Commands.closeStdin', 'input', async (sandbox) => {
  const handle = await sandbox.commands.run('cat', { background: true, stdin: true })
  await sandbox.commands.sendStdin(handle.pid, 'hello\n')
  await sandbox.commands.closeStdin(handle.pid)
  assert((await handle.wait()).stdout === 'hello\n', 'it came')
})

use('CommandHandle.sendStdin CommandHandle.closeStdin', 'input by a handle', async (sandbox) => {
  const handle = await sandbox.commands.run('cat', { background: true, stdin: true })
  await handle.sendStdin('hello\n')
  await handle.closeStdin()
  assert((await handle.wait()).stdout === 'hello\n', 'it came')
})

use('Pty.create Pty.sendInput Pty.resize Pty.connect Pty.kill', 'a terminal', async (sandbox) => {
  let shown = ''
  const onData = (data) => (shown += new TextDecoder().decode(data))
  const terminal = await sandbox.pty.create({ rows: 24, cols: 80, timeoutMs: 0, onData: () => {} })
  await sandbox.pty.resize(terminal.pid, { rows: 30, cols: 100 })
  const again = await sandbox.pty.connect(terminal.pid, { onData, timeoutMs: 0 })
  await sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode('stty size; exit\n'))
  await again.wait()
  assert(shown.includes('30 100'), shown)
  const other = await sandbox.pty.create({ rows: 24, cols: 80, timeoutMs: 0, onData: () => {} })
  assert(await sandbox.pty.kill(other.pid), 'killed')
})

// -- files

use('Filesystem.write Filesystem.read Filesystem.exists Filesystem.getInfo Filesystem.remove Filesystem.rename', 'files', async (sandbox) => {
  await sandbox.files.write('a/b.txt', 'hello')
  assert((await sandbox.files.read('a/b.txt')) === 'hello', 'read')
  assert((await sandbox.files.read('a/b.txt', { format: 'bytes' })).length === 5, 'octets')
  assert((await sandbox.files.getInfo('a/b.txt')).path === '/home/user/a/b.txt', 'its path')
  await sandbox.files.rename('a/b.txt', 'a/c.txt')
  await sandbox.files.remove('a/c.txt')
  assert(!(await sandbox.files.exists('a/c.txt')), 'gone')
})

use('Filesystem.writeFiles Filesystem.list Filesystem.makeDir', 'several files', async (sandbox) => {
  assert(await sandbox.files.makeDir('several'), 'made')
  assert(!(await sandbox.files.makeDir('several')), 'there already')
  await sandbox.files.writeFiles(['x', 'y', 'z'].map((name) => ({ path: `several/${name}`, data: name })))
  assert((await sandbox.files.list('several')).map((one) => one.name).join('') === 'xyz', 'listed')
})

use('Filesystem.watchDir WatchHandle.stop', 'a watch', async (sandbox) => {
  const seen = []
  await sandbox.files.makeDir('watched')
  const watch = await sandbox.files.watchDir('watched', (event) => seen.push(event.name))
  await sandbox.files.write('watched/new.txt', 'x')
  await waitFor(() => seen.includes('new.txt'), 'an event')
  await watch.stop()
})

// -- git

/** Commands that are run in a sandbox; or that are answered from what `git_steps.py` tells. What is asked for is told, and compared there. */
function gitCommands(commands) {
  const known = process.env.GIT_TOLD ? JSON.parse(readFileSync(process.env.GIT_TOLD, 'utf8')) : null
  return {
    known,
    run: async (command, options = {}) => {
      asked.push([command, options.envs ?? null, options.user ?? null, options.cwd ?? null])
      if (!known) return commands.run(command, options)
      assert(known.length >= asked.length, `this is asked for besides: ${command}`)
      const [stderr, stdout, exitCode, error] = known[asked.length - 1][1]
      if (exitCode) throw new CommandExitError({ stderr, stdout, exitCode, error })
      return { stderr, stdout, exitCode, error }
    },
  }
}

use('Git.init Git.configureUser Git.add Git.commit Git.status Git.branches Git.createBranch Git.checkoutBranch Git.deleteBranch Git.setConfig Git.getConfig Git.reset Git.restore Git.clone Git.push Git.pull Git.remoteAdd Git.remoteGet Git.dangerouslyAuthenticate', 'git', async (sandbox) => {
  const commands = gitCommands(sandbox.commands)
  const git = new sandbox.git.constructor(commands)
  const write = (text) => commands.known ?? sandbox.files.write(`${at}/file`, text)
  const [at, origin, clone] = ['/home/user/repository', '/home/user/origin.git', '/home/user/clone']
  await git.init(at, { initialBranch: 'main' })
  await git.configureUser('Somebody', 'somebody@mail.example')
  await write('one')
  await git.add(at)
  await git.commit(at, 'first')
  await write('two')
  assert((await git.status(at)).fileStatus.map((one) => one.name).join() === 'file', 'changed')
  await git.restore(at, { paths: ['file'] })
  await git.createBranch(at, 'other')
  await git.checkoutBranch(at, 'main')
  assert((await git.branches(at)).branches.length === 2, 'two branches')
  await git.deleteBranch(at, 'other')
  await git.setConfig('core.editor', 'true', { scope: 'local', path: at })
  assert((await git.getConfig('core.editor', { scope: 'local', path: at })) === 'true', 'as it was set')
  await git.reset(at, { mode: 'hard', target: 'HEAD' })
  await git.init(origin, { bare: true, initialBranch: 'main' })
  await git.remoteAdd(at, 'origin', origin)
  assert((await git.remoteGet(at, 'origin')) === origin, 'the remote')
  await git.push(at, { remote: 'origin', branch: 'main' })
  await git.clone(`file://${origin}`, { path: clone })
  await git.pull(clone, { remote: 'origin', branch: 'main' })
  await git.dangerouslyAuthenticate({ username: 'user', password: 'password', host: 'git.example' })
})

// -- what is not about one sandbox

use('Template.exists Template.aliasExists', 'a template', async () => {
  assert((await Template.exists('base')) === true, 'base')
  assert((await Template.exists('no-such-template')) === false, 'another')
  assert((await Template.aliasExists('base')) === true, 'by its other name')
})

use('Template.fromBaseImage Template.fromImage Template.fromTemplate Template.fromDockerfile Template.fromDebianImage Template.fromUbuntuImage Template.fromPythonImage Template.fromNodeImage Template.fromBunImage Template.fromAlpineImage Template.fromArchImage Template.fromFedoraImage Template.fromAWSRegistry Template.fromGCPRegistry Template.skipCache Template.toJSON Template.toDockerfile', 'descriptions', async () => {
  for (const method of ['fromBaseImage', 'fromDebianImage', 'fromUbuntuImage', 'fromPythonImage', 'fromNodeImage', 'fromBunImage', 'fromAlpineImage', 'fromArchImage', 'fromFedoraImage']) {
    Template()[method]()
  }
  Template().fromTemplate('base')
  Template().fromDockerfile('FROM debian:12')
  Template().skipCache()
  assert(await Template.toJSON(Template().fromImage('debian:12')), 'JSON')
  assert(Template.toDockerfile(Template().fromImage('debian:12')).includes('debian:12'), 'a Dockerfile')
})

use('Template.build', 'a build', async () => {
  await Template.build(Template().fromTemplate('base').runCmd('true'), 'built-here')
})

use('Template.buildInBackground', 'a build in the background', async () => {
  await Template.buildInBackground(Template().fromTemplate('base').runCmd('true'), 'built-here')
})

use('Template.getTags', 'tags', async () => assert((await Template.getTags('base')).length, 'some'))
use('Template.assignTags', 'assigned tags', () => Template.assignTags('base:latest', 'v1'))
use('Template.removeTags', 'removed tags', () => Template.removeTags('base', 'v1'))
use('Volume.create', 'a volume', () => Volume.create('shared'))
use('Volume.list', 'volumes', () => Volume.list())
use('Secret.create', 'a secret', () => Secret.create('name', 'value'))
use('Secret.list SecretPaginator.nextItems', 'secrets', () => Secret.list().nextItems())

// -- a client with settings of its own

use('E2B.Sandbox E2B.Template', 'a client', async () => {
  const kept = { ...process.env }
  const settings = { apiKey: kept.E2B_API_KEY, apiUrl: kept.E2B_API_URL, sandboxUrl: kept.E2B_SANDBOX_URL, domain: kept.E2B_DOMAIN }
  for (const name of ['E2B_API_KEY', 'E2B_API_URL', 'E2B_SANDBOX_URL', 'E2B_DOMAIN']) delete process.env[name]
  try {
    const client = new E2B(settings)
    const made = await client.Sandbox.create({ timeoutMs: 60_000 })
    assert((await made.commands.run('echo here')).stdout === 'here\n', 'its output')
    await made.kill()
    assert((await client.Template.exists('base')) === true, 'base')
  } finally {
    Object.assign(process.env, kept)
  }
})

use('E2B.Volume', 'volumes of a client', () => new E2B({}).Volume.list())
use('E2B.Secret', 'secrets of a client', () => new E2B({}).Secret.list().nextItems())

const there = new Set(published())
const wanted = new Set(process.argv.slice(2))
const sandbox = await Sandbox.create({ timeoutMs: 1_800_000 })
try {
  for (const { methods, name, body } of uses) {
    const mine = methods.filter((method) => there.has(method))
    if (!mine.length || (wanted.size && !wanted.has(name))) continue
    const began = Date.now()
    let outcome = 'ok'
    try {
      await body(sandbox)
    } catch (error) {
      outcome = `${error?.constructor?.name}: ${error?.message ?? error}`.slice(0, 400)
    }
    console.error(`${name}: ${outcome} (${(Date.now() - began) / 1000} s)`)
    for (const method of mine) if ((results[method] ?? 'ok') === 'ok') results[method] = outcome
  }
} finally {
  await sandbox.kill()
}
console.log(JSON.stringify({ version: manifest.version, public: [...there], unknown: unknown(), results, git: asked.map((one) => [one]) }))
