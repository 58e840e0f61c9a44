"""Flow: the verbs. The rooms read like the pipeline; stages hand over by rows in Postgres, never by calls.

    accept ──▶ decide ──▶ run          an event is stored, decided, and its runs are executed
                 │  ▲
                 ▼  │
                 hold                  what cannot launch now waits with a reason and a time, and is decided again
    keep · look · control              beside the pipeline: background work, what operators read, what operators do

Imports go one way: control and look → keep → hold → run → decide and accept. `run` lies below `hold` because the end of
a run frees a slot, and the delivery that takes it is decided in the same transaction: `hold` passes that step in.
`shared_read` (one read of the database for many callers) is used by accept and look.

accept: who may publish, what is valid, what is stored. 202 only after the commit.
    access              check the token, its scope and rate before every route
    token_use           rate limits of tokens; the log of refused tokens
    lookups             bounded, cached reads on behalf of unauthenticated clients
    ingest              store events and their inbox rows; concurrent requests share commits
    webhooks            look up a source's webhook; store the event of a signed request

decide: what happens to each event, one transaction per batch. Everything here runs under the same locks and commits at
once, so an event is never half decided.
    dispatch            claim new events from the inbox and decide them: fast path or general path
    gate                per source: admit, or hold until a slot (limit, pause, breaker)
    match               per event: which triggers fire
    deliver             per event and trigger: launch, hold, skip or fail; pure
    delivery_state      load what `deliver` depends on under the triggers' locks, and save what it changed
    batch               match, deliver and create runs, for new and retried events alike
    one_by_one          when a batch fails: process its items separately, dead-letter the one at fault
    source_failures     failed runs that count for their source's breaker
    reporting           metrics, log lines and decision rows, the same for every stage
    spans               the traces of what was decided
    time_slice          CPU-bound work yields to the event loop

hold: waiting events and deliveries. A row decides whether and when; the queue only wakes workers early.
    event_retry         held events whose slot has come pass the gate again
    delivery_retry      due deliveries are decided again
    delivery_check      does a due delivery still stand, by event and trigger as they are now; pure
    replan              give waiting rows new times when a plan changes: the loop
    event_plan          the plan of a source: slots for its events
    delivery_plan       the plan of a trigger: times for its deliveries

run: claim due runs, execute the user's functions, write the outcome. A worker that lost its claim writes nothing.
    runner              claim, execute and finish runs; the life of a worker's executions
    due                 the due runs that a worker claims, with what is needed to execute them
    claims              no claim is taken up twice
    claimed_ahead       runs claimed in advance and not started
    execution           one claimed run, from the start of its function to its end or suspension
    workflow            a workflow in Python: the function, how to call it, its `ctx`
    calls               calls of users' functions, and what counts as their failure
    output              what workflows and steps return, as JSON
    journal             the steps that one run has recorded
    endings             how one attempt ends: finished, or suspended until a time
    outcomes            what runs write, many in one transaction
    finish              the end of a run frees its slot, moves breakers, wakes the next delivery
    leases              renew leases from a thread of their own
    leaving             a user's function leaves its task when it is told to
    earlier             executions that were told to leave and have not yet
    quarantine          execute runs whose workers died repeatedly, each alone
    http                workflows of kind `http`
    http_guard          outgoing requests, signed and bounded
    spans               the traces of runs and steps

keep: background work that keeps the system moving and bounded.
    reconcile           release expired claims; send lost wake-ups again
    schedule            publish the events of due ticks
    replay              process dead letters again
    prune               delete finished, old rows
    secrets             encrypt stored secrets with the first key

look: what operators read. Nothing here decides or writes.
    explain             every decision about one event
    health              the snapshot of the cluster, and the shared gauges
    verdict             the causes of a status other than ok; pure
    backlog             queue depths and waiting rows; pure
    doctor              check what the guarantees depend on
    ready               can this process do its work
    notices             warnings about the configuration

control: what operators do, shared by API and CLI. Each verb is one transaction with its audit row.
    sources             limits, breakers, pause, resume
    triggers            create, update, delete, pause, resume
    workflows           create, update, delete, rotate the secret (kind `http`)
    webhooks            set, rotate, retire, delete
    tokens              create, revoke
    runs                cancel
    dead_letters        replay one, many at a rate, stop
    retries             cancel and force waiting rows, one or many: the table of kinds
    event_retries       … for events
    delivery_retries    … for deliveries
    step_retries        … for steps
    verbs               what a kind provides for cancel and force
    pauses              checks of a pause's length
"""
