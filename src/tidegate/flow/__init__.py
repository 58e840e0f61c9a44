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
    runner              claim runs for one worker, have them executed, write what came of them
    claiming            claim due runs, some in advance; each claim is taken up once
    executions          the runs that one worker executes, in slots, until their end is written
    states              the states of an execution
    execution           one attempt at one claimed run, until it ends or must wait
    workflow            a workflow in Python: the function, how to call it, its `ctx`
    user_calls          calls of users' functions: what counts as a failure, which results can be stored
    stopping            stop a call of a user's function, and wait for those that have not stopped yet
    journal             what one execution writes of its steps
    endings             how one attempt ends: finished, or suspended until a time; pure
    outcomes            write outcomes of steps, suspensions and ends, many runs in one transaction
    finish              the end of a run frees its slot, moves breakers, wakes the next delivery
    leases              renew leases from a thread of their own
    quarantine          execute runs whose workers died repeatedly, each alone
    http                workflows of kind `http`: signed, bounded requests
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
    retry_verbs         what a kind provides for cancel and force
    pauses              checks of a pause's length
"""
